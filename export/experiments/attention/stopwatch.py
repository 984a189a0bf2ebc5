"""Speed of a changed model, and its INT8 predictions: ONNX Runtime, CPU, one thread, one input at a time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from edge.datatypes import Array
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.convert import to_onnx
from export.heads import SequenceClassifier
from export.quantization.dynamic import dynamic_int8
from export.reduction.latency import compare, feeds_of
from export.reduction.plan import TOLERANCE
from export.tasks.predictions import Predictions
from export.tasks.tokens import Rows, sorted_batches

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


class Stopwatch:
    """Times models against a dense one, which is exported once for each length."""

    def __init__(self, dense: SequenceClassifier, lengths: Sequence[int], calls: int) -> None:
        self._dense, self._lengths, self._calls = dense, lengths, calls
        self._exported: dict[int, bytes] = {}

    def speeds(self, model: nn.Module, *, int8: bool = False) -> tuple[Speed, ...]:
        """Return the speed of a model at each length."""
        return tuple(self._speed(model, tokens, int8) for tokens in self._lengths)

    def _speed(self, model: nn.Module, tokens: int, int8: bool) -> Speed:
        feeds = feeds_of(self._dense.transformer.config, tokens)
        inputs = {name: torch.from_numpy(array) for name, array in feeds.items()}
        if tokens not in self._exported:
            self._exported[tokens] = to_onnx(self._dense, inputs, [_OUTPUT], {})
        exported = to_onnx(model, inputs, [_OUTPUT], {})
        if int8:
            exported = dynamic_int8(exported)
        found = compare(self._exported[tokens], exported, feeds, self._calls)
        bound = None if int8 else multiplications(self._dense, inputs) / multiplications(model, inputs)
        return Speed(tokens, found.milliseconds, found.dense_milliseconds, found.ratio, bound)


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
