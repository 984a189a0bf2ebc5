"""Seeds of prompts: each purpose has its own, and so has each stage of each training.

torch's generator on the CPU reads the low 32 bits of a seed and ignores the rest: 2**32 is the same seed as 0. Steps of
trainings have hashes in the upper half of the 32 bits, and everything else has small numbers.
"""

from __future__ import annotations

import numpy as np
import torch

#: Of evaluations. Shifted prompts add a number of pairs, which is below 1,000.
EVALUATION = 0
#: Of the prompts that choose the best epoch, that a bundle is checked with, that calibrate INT8 and judge it, and that
#: calibrate a reduction.
VALIDATION, GOLDEN, CALIBRATION, JUDGED, REDUCTION = range(1000, 1005)


def generator_of(seed: int) -> torch.Generator:
    """Return a generator with a seed of this module."""
    return torch.Generator().manual_seed(seed)


def training_generator(seed: int, stage: int, step: int) -> torch.Generator:
    """Return the generator of one step of a training."""
    mixed = int(np.random.SeedSequence(seed, spawn_key=(stage, step)).generate_state(1)[0])
    return torch.Generator().manual_seed(mixed | 2**31)
