"""Targets and ways of a reduction, for command lines without NumPy and torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from edge.errors import UsageError
from export.estimate.devices import BOARD_MODES, BoardMode
from export.training.points import THIS

#: Times of the shapes of layers, in the state of a reduction.
LATENCIES = "latency.json"
#: The defaults of --tokens and --calibration.
TIMED_TOKENS, CALIBRATION_EXAMPLES = 32, 256
#: Those of --passes and --lr, of a restoration.
PASSES, LEARNING_RATE = 3.0, 1e-3

#: This machine, a Jetson in a power mode, or the device of a latency table.
Target: TypeAlias = "Literal['this'] | BoardMode | Path"

#: How a model is reduced: ``search`` finds a shape for each layer, and ``spread`` keeps whole layers.
Strategy: TypeAlias = Literal["search", "spread"]


def parse_target(text: str) -> Target:
    """Return the target of ``--for``; raise a UsageError that lists all."""
    if text == THIS:
        return THIS
    if text in BOARD_MODES:
        return BOARD_MODES[text]
    expected = f"{THIS}, which is measured here, or one of {', '.join(BOARD_MODES)}"
    fix = "Give one of these; for another device, give --latency-table with its table."
    raise UsageError("--for", given=text, expected=expected, fix=fix)
