"""Latencies of the runs of families on a Jetson, predicted from the sizes of their layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import msgspec
import numpy as np
import scipy.stats

from edge.bench.layer_latencies import PREDICTION, Label
from export.estimate.devices import DEFAULT_BOARD, DEVICES
from export.estimate.roofline import Prediction, predict
from export.estimate.sizes import USUAL_BATCHES, USUAL_LENGTHS
from export.estimate.work import transformer_work
from export.models.transformer import LayerShape, TransformerConfig
from export.papers.frontier.records import FP32, Answered, Family
from export.papers.frontier.settings import DENSE


class BoardPoint(msgspec.Struct, frozen=True):
    """A run in FP16 with TensorRT, for inputs of one size: means over the families that have it.

    Attributes:
        low_ms, high_ms: the band of the prediction.
        times_faster: the latency of the same family's dense model over the run's; the geometric mean.
    """

    run: str
    tokens: int
    rows: int
    milliseconds: float
    low_ms: float
    high_ms: float
    times_faster: float


class Board(msgspec.Struct, frozen=True):
    """All predictions for a board in a power mode."""

    device: str
    power_mode: str
    label: Label
    points: tuple[BoardPoint, ...]


def board_of(families: Sequence[Family]) -> Board:
    """Return the predictions for the runs that have a file in FP32, by the order of the records."""
    runs = dict.fromkeys(run for family in families for run, precision in family.answers if precision == FP32)
    points = [point for run in runs for point in _points(run, [family.answered for family in families])]
    return Board(DEVICES[DEFAULT_BOARD.board].name, DEFAULT_BOARD.power_mode, PREDICTION, tuple(points))


def _points(run: str, families: Sequence[Answered]) -> Iterator[BoardPoint]:
    having = [family for family in families if run in family.layers]
    for tokens, rows in product(USUAL_LENGTHS, USUAL_BATCHES):
        found = [_predicted(family.dim, family.layers[run], tokens, rows) for family in having]
        dense = [_predicted(family.dim, family.layers[DENSE], tokens, rows) for family in having]
        faster = [one.milliseconds / other.milliseconds for one, other in zip(dense, found, strict=True)]
        means = {
            name: float(np.mean([getattr(one, name) for one in found]))
            for name in ("milliseconds", "low_ms", "high_ms")
        }
        yield BoardPoint(run=run, tokens=tokens, rows=rows, **means, times_faster=float(scipy.stats.gmean(faster)))


def _predicted(dim: int, layers: tuple[LayerShape, ...], tokens: int, rows: int) -> Prediction:
    config = TransformerConfig(architecture="bert", dim=dim, layers=layers)
    return predict(transformer_work(config, tokens, rows), None, DEFAULT_BOARD.mode)
