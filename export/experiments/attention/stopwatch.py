"""Speed of a changed model, and its INT8 predictions: ONNX Runtime, CPU, one thread, one input at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from edge.datatypes import Array
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.data.tokens import Rows, sorted_batches
from export.finetune.predictions import Predictions
from export.models.convert import to_onnx
from export.models.heads import SequenceClassifier
from export.quantize.dynamic import dynamic_int8
from export.reduce.latency import compare, feeds_of
from export.reduce.plan import TOLERANCE

_OUTPUT = "logits"
_BATCH = 16


class Speed(msgspec.Struct, frozen=True):
    """Times of a model and the dense one, in turns.

    Attributes:
        milliseconds: the median time of a call.
        dense_milliseconds: that of the dense model in FP32.
        ratio: dense time over its time.
        bound: the dense model's multiplications over its own; None for INT8.
    """

    tokens: int
    milliseconds: float
    dense_milliseconds: float
    ratio: float
    bound: float | None = None

    @property
    def explained(self) -> bool:
        """Whether the saved multiplications explain the speed; if not, the measurement is wrong."""
        return self.bound is None or self.ratio <= self.bound * (1 + TOLERANCE)


class Timed(NamedTuple):
    """A model to be timed at a length: its ONNX file, and the largest ratio that its multiplications explain."""

    tokens: int
    onnx: bytes
    bound: float | None


def timed_files(
    dense: SequenceClassifier, model: nn.Module, lengths: Sequence[int], *, int8: bool = False
) -> Iterator[Timed]:
    """Export a model, which replaces the dense one, for each length."""
    for tokens in lengths:
        inputs = _inputs(dense, tokens)
        exported = to_onnx(model, inputs, [_OUTPUT], {})
        if int8:
            yield Timed(tokens, dynamic_int8(exported), None)
        else:
            yield Timed(tokens, exported, multiplications(dense, inputs) / multiplications(model, inputs))


class Stopwatch:
    """Times exported models against a dense one, which is exported once for each length."""

    def __init__(self, dense: SequenceClassifier, calls: int) -> None:
        self._dense, self._calls = dense, calls
        self._exported: dict[int, bytes] = {}

    def speeds(self, files: Iterable[Timed]) -> tuple[Speed, ...]:
        """Return the speed of a model at each length."""
        return tuple(map(self._speed, files))

    def _speed(self, file: Timed) -> Speed:
        tokens = file.tokens
        if tokens not in self._exported:
            self._exported[tokens] = to_onnx(self._dense, _inputs(self._dense, tokens), [_OUTPUT], {})
        feeds = feeds_of(self._dense.transformer.config, tokens)
        found = compare(self._exported[tokens], file.onnx, feeds, self._calls)
        return Speed(tokens, found.milliseconds, found.dense_milliseconds, found.ratio, file.bound)


def _inputs(dense: SequenceClassifier, tokens: int) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in feeds_of(dense.transformer.config, tokens).items()}


def multiplications(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Return the multiplications of a model for some inputs, with scorers and masked products."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(*inputs.values())
    return int(counter.get_total_flops()) // 2


def predict_int8(model: SequenceClassifier, rows: Rows) -> Predictions:
    """Return the predictions of a model in dynamic INT8 on ONNX Runtime."""
    batches = [(indices, rows.batch(indices)) for indices in sorted_batches(rows.lengths, _BATCH)]
    example = batches[0][1].named
    exported = to_onnx(model, example, [_OUTPUT], {name: {0: "batch", 1: "length"} for name in example})
    runner = OnnxRuntimeRunner(dynamic_int8(exported), subject="a model in INT8")
    logits: Array = np.empty((len(rows.targets), model.classifier.out_features), dtype=np.float32)
    try:
        for indices, batch in batches:
            feeds = {name: tensor.numpy() for name, tensor in batch.named.items()}
            logits[indices] = runner.infer(feeds)[_OUTPUT]
    finally:
        runner.close()
    return Predictions(logits, rows.targets)
