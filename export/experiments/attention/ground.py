"""Common inputs of all mechanisms of a comparison, and the models that they return."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from export.adaptive.budget import CostCurve
from export.heads import SequenceClassifier
from export.tasks.tokens import Batch, Encoded, sorted_batches

#: Of each original head of each layer, the share of its coordinates that is left, [layers, H].
Kept: TypeAlias = tuple[tuple[float, ...], ...]
_BATCH = 32


@dataclass(frozen=True)
class Ground:
    """Common inputs of all mechanisms.

    Attributes:
        dense: the fine-tuned model; it is left alone.
        score: of it on the hold-out.
        calibration: real inputs, with targets.
        seed: of what is random.
        share: of attention to keep, where a mechanism has a choice.
        target_speedup: of the reduced plan that has one.
        tokens: in the input of a measurement.
        curve: what a layer costs by the share of its heads' coordinates.
        state: a directory for what reductions want to keep.
    """

    dense: SequenceClassifier
    score: float
    calibration: Encoded
    seed: int
    share: float
    target_speedup: float
    tokens: int
    curve: CostCurve
    state: Path

    def batches(self) -> list[Batch]:
        """Return the calibration inputs in batches."""
        return [self.calibration.batch(rows) for rows in sorted_batches(self.calibration.lengths, _BATCH)]


class Made(NamedTuple):
    """A changed model, and what is left of its heads where training does not change it."""

    model: SequenceClassifier
    kept: Kept | None = None
