"""The argument ``RUN...`` of the commands: runs of calculators; without torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from edge.errors import Raw, UsageError
from export.papers.calculator.specs import SPECS
from export.training.runs import read_config


def check_calculators(runs: Iterable[Path], names: Collection[str] = tuple(SPECS)) -> None:
    """Check that directories are runs of calculators with one of some names.

    Raises:
        CheckpointError: one is no run directory, or its configuration is malformed.
        UsageError: one is the run of another model.
    """
    for run in runs:
        model = read_config(run).model
        if model not in names:
            fix = "Give runs of `fewheads train calculator-…`."
            raise UsageError(f"RUN {run}", given=model, expected=f"one of {', '.join(names)}", fix=fix)


def not_a_seed(run: Path, given: str) -> UsageError:
    """Return the error about a run that is no further seed of its model and training."""
    expected, fix = "runs of one model and training that differ in their seed", "Leave one of them out."
    return UsageError(f"RUN {run}", given=Raw(given), expected=expected, fix=fix)
