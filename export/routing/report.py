"""Report on two runs and the policies between them; all of it goes into JSON."""

from __future__ import annotations

import msgspec

from export.routing.diagnose import Diagnosis, Judged
from export.tasks.metrics import Difference


class Cascade(msgspec.Struct, frozen=True, tag_field="type", tag="cascade"):
    """The lean tier answers first; where its margin is below ``margin``, the full tier answers.

    ``lean`` and ``full`` are the names that ``fewheads export FULL LEAN`` gives to the tiers; a lean run without a
    recorded speed has the name of its directory here. The margin is the likeliest class's probability minus the
    second's.
    """

    lean: str
    full: str
    margin: float


class PolicyReport(msgspec.Struct, frozen=True):
    """A policy on a split.

    Attributes:
        judged: at the threshold that was chosen on the choosing half.
        controls: the accuracy of each control at the same mean cost.
        auc: of the score for "the lean tier is right", with its 95 % interval.
        area: between the policy's curve and the static line, as a mean of accuracy.
    """

    judged: Judged
    controls: dict[str, float]
    auc: Difference
    area: float


class SplitReport(msgspec.Struct, frozen=True):
    """All policies on a split.

    Attributes:
        split: its name.
        items: how many.
        lean_accuracy: of the lean tier alone.
        full_accuracy: of the full tier alone.
        differing: share of items that the tiers answer differently.
        costs: mean costs, in units of the full tier's time.
        curves: the accuracy at each of the costs, by the name of the policy or control.
        policies: in detail.
    """

    split: str
    items: int
    lean_accuracy: float
    full_accuracy: float
    differing: float
    costs: tuple[float, ...]
    curves: dict[str, tuple[float, ...]]
    policies: tuple[PolicyReport, ...]


class Route(msgspec.Struct, frozen=True):
    """Result of a comparison: the choosing half, then the dev splits; and the cascade, whether recommended or not."""

    task: str
    full: str
    lean: str
    cost_ratio: float
    diagnosis: Diagnosis
    cascade: Cascade
    splits: tuple[SplitReport, ...]
