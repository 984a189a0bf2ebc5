"""The argument ``RUN...`` of the commands: runs of calculators; without torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from edge.errors import UsageError
from export.calculator.specs import SPECS
from export.runs import read_config


def check_calculators(runs: Iterable[Path]) -> None:
    """Check that directories are runs of calculators.

    Raises:
        CheckpointError: one is no run directory, or its configuration is malformed.
        UsageError: one is the run of another model.
    """
    for run in runs:
        model = read_config(run).model
        if model not in SPECS:
            fix = "Give runs of `fewheads train calculator-…`."
            raise UsageError(f"RUN {run}", given=model, expected=f"one of {', '.join(SPECS)}", fix=fix)
