"""Settings of a training, and its learning rate."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

Precision = Literal["fp32", "bf16"]
Schedule = Literal["constant", "linear", "cosine"]
Clips = Literal["all", "each"]


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a training.

    Attributes:
        optimizer: see :mod:`export.training.optimizers`.
        peak_learning_rate: after the warm-up.
        warmup_share: the share of all steps in which the learning rate rises linearly from 0.
        schedule: how the learning rate falls after the warm-up.
        final_share: of the peak, where ``cosine`` and ``linear`` end.
        betas: of AdamW.
        weight_decay: decoupled; AdamW with 0 is plain Adam.
        decays: whether ``weight_decay`` applies to all parameters, or to matrices only.
        clip_norm: the largest norm of gradients; None does not clip.
        clips: the norm of ``all`` gradients together, or of ``each`` tensor's, as in Keras' ``clipnorm``.
        patience: epochs without a gain of more than ``min_delta`` until the training stops; None runs all epochs.
        min_delta: in units of the score; with minus infinity, the last epoch is kept in place of the best one.
        average: decay of a running average of the weights, see :class:`export.training.average.AveragedWeights`, which
            is what is scored, and what is kept after the last epoch; None keeps the weights of the best epoch.
        precision: of the multiplications; weights, losses and the optimiser's sums are always FP32.
    """

    epochs: int
    peak_learning_rate: float
    optimizer: Literal["adamw", "muon"] = "adamw"
    batch_size: int = 32
    warmup_share: float = 0.0
    schedule: Schedule = "constant"
    final_share: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decays: Literal["all", "matrices"] = "matrices"
    clip_norm: float | None = None
    clips: Clips = "all"
    patience: int | None = None
    min_delta: float = 0.0
    average: float | None = None
    precision: Precision = "fp32"


def learning_rate(recipe: Recipe, progress: float) -> float:
    """Return the learning rate after a share ``progress`` of all steps."""
    if progress < recipe.warmup_share:
        return recipe.peak_learning_rate * progress / recipe.warmup_share
    left = 1 - (progress - recipe.warmup_share) / (1 - recipe.warmup_share)  # falls from 1 to 0
    share = {"constant": 1.0, "linear": left, "cosine": 0.5 * (1 - math.cos(math.pi * left))}[recipe.schedule]
    return recipe.peak_learning_rate * (recipe.final_share + (1 - recipe.final_share) * share)
