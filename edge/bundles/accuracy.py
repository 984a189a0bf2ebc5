"""Accuracies of a bundle's tiers, as far as its measures compare them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from edge.bundles.manifest import Measure

#: Metrics of which more is better. Others do not compare tiers.
_MORE_IS_BETTER: Final = frozenset(
    ("accuracy", "agreement", "cosine", "exact_match", "f1", "macro_f1", "matthews", "pearson", "spearman")
)
_SPLIT: Final = re.compile(r"(?P<data>.+), tier (?P<tier>[^\s,]+)(?: on (?P<runtime>[^\s,]+))?")

#: Values of a tier, more of which is better, by metric, data and number of items.
Accuracies = Mapping[tuple[str, str, int], float]


def accuracies(measures: Iterable[Measure], runtimes: Mapping[str, str]) -> dict[str, Accuracies]:
    """Return what is known of each tier.

    A measure is of the tier that its split ends with: ``DATA, tier NAME``, or ``DATA, tier NAME on RUNTIME`` if it is
    of the file for this runtime alone.

    Args:
        runtimes: of the files that compute, by tier.
    """
    by_tier: dict[str, dict[tuple[str, str, int], float]] = {tier: {} for tier in runtimes}
    for measure in measures:
        split = _SPLIT.fullmatch(measure.split)
        if not split or measure.metric not in _MORE_IS_BETTER:
            continue
        tier, runtime = split["tier"], split["runtime"]
        if tier in by_tier and runtime in (None, runtimes[tier]):
            by_tier[tier][measure.metric, split["data"], measure.n] = measure.value
    return {**by_tier}


def is_as_accurate(candidate: Accuracies, reference: Accuracies) -> bool:
    """Return whether a tier is known to be at least as accurate as another one, by all measures that both have."""
    common = candidate.keys() & reference.keys()
    return bool(common) and all(candidate[key] >= reference[key] for key in common)
