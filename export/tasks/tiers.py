"""Names of a bundle's tiers: ``x1`` is the full model, ``x3`` is three times as fast by its recorded measurement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edge.errors import Literally, UsageError
from export.exported import FULL
from export.runs import RunConfig

#: A manifest holds eight tiers, and each run has a twin in INT8.
_MOST_RUNS = 4


def tier_names(runs: Sequence[Path], configs: Sequence[RunConfig], given: Sequence[str]) -> list[str]:
    """Return a name for each run.

    Args:
        runs: the full model first.
        given: names to use instead, one for each run in their order; empty for names by speed.

    Raises:
        UsageError: there are too many runs, names do not fit the runs or are alike, or a run records no speed.
    """
    if len(runs) > _MOST_RUNS:
        fix = "Leave some of them out."
        raise UsageError("runs of one bundle", given=len(runs), expected=f"{_MOST_RUNS} at most", fix=fix)
    if given and len(given) != len(runs):
        fix = "Give --tier-name once for each run, in the same order."
        raise UsageError("--tier-name", given=list(given), expected=f"{len(runs)} names", fix=fix)
    names = list(given) or [FULL]
    for run, config in zip(runs[len(names) :], configs[len(names) :], strict=True):
        name = speed_name(configs[0], config)
        if name is None:
            given_speed, expected = Literally("no measured speed"), "a run that comes from 'fewheads reduce'"
            fix = "Name the tiers: give --tier-name once for each run."
            raise UsageError(f"run {run}", given=given_speed, expected=expected, fix=fix)
        names.append(name)
    taken = [*names, *(f"{name}-int8" for name in names)]
    if len(set(taken)) < len(taken):
        fix = "Name the tiers: give another --tier-name for each run."
        raise UsageError("tiers", given=names, expected="names that differ, with -int8 behind them too", fix=fix)
    return names


def speed_name(full: RunConfig, lean: RunConfig) -> str | None:
    """Return ``xN`` for a run that was measured to be N times as fast as the full one; None for one without a speed."""
    if lean.speedup is None:
        return None
    return f"x{lean.speedup.ratio / (full.speedup.ratio if full.speedup else 1):.2g}"
