"""Sizes of language models, and how each is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec.structs import replace

from export.training.recipe import Precision, Recipe

Size = Literal["tiny", "small", "gpt2"]
#: The most steps between two scores.
_STEPS_PER_EPOCH = 500


class Plan(msgspec.Struct, frozen=True):
    """The shape of a model of GPT-2's architecture, and its training.

    Attributes:
        positions: the most tokens of a text.
        vocabulary: of a BPE that is trained for it.
        steps: of the training, in epochs of equal length.
    """

    dim: int
    layers: int
    heads: int
    positions: int
    vocabulary: int
    steps: int
    recipe: Recipe

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps between two scores."""
        return self.steps // self.recipe.epochs


def plan_of(size: Size, *, steps: int | None = None, precision: Precision = "fp32") -> Plan:
    """Return the plan of a size, with so many steps, or up to a hundredth fewer."""
    plan = _PLANS[size]
    steps = steps or plan.steps
    epochs = -(-steps // _STEPS_PER_EPOCH)
    steps = steps // epochs * epochs
    warmup_share = min(0.1, _WARMUP_STEPS / steps)
    recipe = replace(plan.recipe, epochs=epochs, warmup_share=warmup_share, precision=precision)
    return replace(plan, steps=steps, recipe=recipe)


_WARMUP_STEPS = 200
_MUON = Recipe(
    epochs=1,
    optimizer="muon",
    peak_learning_rate=5e-3,
    batch_size=64,
    schedule="cosine",
    final_share=0.05,
    betas=(0.9, 0.95),
    clip_norm=1.0,
)
_ADAMW = replace(_MUON, optimizer="adamw", peak_learning_rate=6e-4, weight_decay=0.1, final_share=0.1)
#: tiny is for tests; small takes two cores an hour; gpt2 has GPT-2's 124 million parameters and its published rate.
_PLANS: Mapping[Size, Plan] = {
    "tiny": Plan(dim=32, layers=2, heads=2, positions=128, vocabulary=512, steps=200, recipe=_MUON),
    "small": Plan(dim=128, layers=4, heads=4, positions=512, vocabulary=2048, steps=10_000, recipe=_MUON),
    "gpt2": Plan(dim=768, layers=12, heads=12, positions=1024, vocabulary=50_257, steps=20_000, recipe=_ADAMW),
}
