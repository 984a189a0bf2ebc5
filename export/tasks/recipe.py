"""Recipes for fine-tuning, and their learning rate."""

from __future__ import annotations

from typing import Literal

import msgspec

Precision = Literal["fp32", "bf16"]


class Distillation(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of a teacher: (1 - imitation) * task + imitation * teacher's outputs + hidden * its hidden states.

    Attributes:
        imitation: 0 to 1.
        temperature: of the logits.
        hidden: of the corresponding layers; 0 ignores them.
    """

    imitation: float = 0.5
    temperature: float = 2.0
    hidden: float = 1.0


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a fine-tuning; the defaults are those of Devlin et al. 2019, "BERT", appendix A.3.

    Attributes:
        epochs: all are run; the best is kept.
        peak_learning_rate: after the warm-up; then it falls linearly to 0.
        warmup_share: share of the steps in which the learning rate rises from 0.
        weight_decay: decoupled, of matrices only.
        clip_norm: the largest norm of all gradients together.
        precision: of the multiplications in training; weights, losses and the optimiser's sums are always FP32.
            ``bf16`` takes half the time on a processor with BF16 instructions, and 12 times as long without them.
        distillation: unused without a teacher.
    """

    epochs: int = 3
    batch_size: int = 32
    peak_learning_rate: float = 5e-5
    warmup_share: float = 0.1
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    precision: Precision = "fp32"
    distillation: Distillation = Distillation()


def learning_rate(recipe: Recipe, progress: float) -> float:
    """Return the learning rate after a share ``progress`` of all steps: linear warm-up, linear decay to 0."""
    if progress < recipe.warmup_share:
        return recipe.peak_learning_rate * progress / recipe.warmup_share
    return recipe.peak_learning_rate * (1 - progress) / (1 - recipe.warmup_share)
