"""The speed of a run: measured when it was reduced, and predicted for a Jetson from the sizes of its layers."""

from __future__ import annotations

from itertools import product

import msgspec

from edge.bench.layer_latencies import PREDICTION, Label
from export.estimate.devices import DEFAULT_BOARD, DEVICES
from export.estimate.roofline import Prediction, predict
from export.estimate.sizes import USUAL_BATCHES, USUAL_LENGTHS
from export.estimate.work import transformer_work
from export.finetune.models import Architecture
from export.models.transformer import LayerShape, TransformerConfig
from export.training.runs import RunConfig, Speedup


class PredictedSpeed(msgspec.Struct, frozen=True):
    """The predicted latency of a run of the model.

    Attributes:
        tokens: of each row; None for images.
        low_ms, high_ms: the band of the prediction.
        times_faster: the latency of the model that the run was reduced from over this one; 1 for a model that was not
            reduced, None where the run does not record the layers of the original.
    """

    tokens: int | None
    rows: int
    milliseconds: float
    low_ms: float
    high_ms: float
    times_faster: float | None


class Speed(msgspec.Struct, frozen=True):
    """The speed of a run's model.

    Attributes:
        measured: over the model that it was reduced from, with ONNX Runtime; None if it was not reduced.
        measured_where: the sizes of the timed runs, such as "at 32 tokens, batch 1"; None as for ``measured``.
        device, power_mode, label: of the predictions, for TensorRT in FP16.
    """

    measured: Speedup | None
    measured_where: str | None
    device: str
    power_mode: str
    label: Label
    predicted: tuple[PredictedSpeed, ...]


def speed_of(config: RunConfig, architecture: Architecture) -> Speed:
    """Return the speed of a run on a task with classes or values."""
    model, speedup = architecture.transformer, config.speedup
    original = model
    if speedup:
        layers = tuple(LayerShape(one.num_heads, one.head_dim, one.ffn_dim) for one in speedup.original)
        original = msgspec.structs.replace(model, layers=layers)
    most = min(model.max_positions, architecture.max_length)
    lengths = [tokens for tokens in USUAL_LENGTHS if tokens <= most] or [most]
    sizes = product([model.max_positions] if model.image_size else lengths, USUAL_BATCHES)
    outputs = len(architecture.labels)

    def predicted(config: TransformerConfig, tokens: int, rows: int) -> Prediction:
        return predict(transformer_work(config, tokens, rows, outputs), None, DEFAULT_BOARD.mode)

    predictions = [
        PredictedSpeed(
            None if model.image_size else tokens,
            rows,
            one.milliseconds,
            one.low_ms,
            one.high_ms,
            predicted(original, tokens, rows).milliseconds / one.milliseconds if original.layers else None,
        )
        for tokens, rows in sizes
        for one in [predicted(model, tokens, rows)]
    ]
    device = DEVICES[DEFAULT_BOARD.board].name
    return Speed(speedup, _where(config), device, DEFAULT_BOARD.power_mode, PREDICTION, tuple(predictions))


def _where(config: RunConfig) -> str | None:
    points = [point.name for point in config.planned.points] if config.planned else []
    if len(points) > 1:
        return f"by the mean time at {' and '.join(points)}"
    return f"at {points[0] if points else f'{config.speedup.tokens} tokens'}" if config.speedup else None
