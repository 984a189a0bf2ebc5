"""What is measured of a changed model: the use of its heads or layers, and speed, memory and INT8 of its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import msgspec
import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from edge.bench.timing import times_in_turns
from edge.datatypes import Array
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.bundle.accuracy import outputs_by_row, predictions_of
from export.data.tokens import Rows, sorted_batches
from export.finetune.objectives import outputs_of
from export.models.heads import Head, SequenceClassifier
from export.models.recorded import recorded
from export.papers.adaptive.gate import GatedLayer
from export.papers.adaptive.memory import peak_bytes
from export.papers.adaptive.scores import scored_modules
from export.quantize.calibration import calibration_feeds, feeds_of, plain_onnx
from export.quantize.int8 import dynamic_int8
from export.quantize.precision import fused

_BATCH = 64
#: Rows of dev that are timed one by one, rows of a batch, and batches.
_TIMED_ROWS, _BATCH_ROWS, _TIMED_BATCHES = 64, 32, 4
#: Calls of all inputs of a size together, and the least of each.
_CALLS, _LEAST_CALLS = 60, 10


class Speed(msgspec.Struct, frozen=True):
    """Dense time over a model's time, in turns, and the bound: the dense model's multiplications over its own.

    Attributes:
        tokens: of the input; None for rows of dev, each with its own length.
        rows: of the input.
    """

    tokens: int | None
    ratio: float
    bound: float
    rows: int = 1


class Int8(msgspec.Struct, frozen=True):
    """A model's file in INT8: answers on dev, and the dense model's time in FP32 over its own, in turns."""

    answers: tuple[float, ...]
    ratio: float


class FileMeasures(msgspec.Struct, frozen=True):
    """What is measured of a model's file, which is that of a bundle, beside the dense one's.

    Attributes:
        speeds: for random tokens of some lengths, for rows of dev one at a time, and for batches of them.
        peak_bytes: of loading the dense and the other file and running a batch, see :mod:`.memory`.
        int8: None where there is no such file: for branches, and for answers that are texts.
    """

    speeds: tuple[Speed, ...]
    peak_bytes: tuple[int, int]
    int8: Int8 | None


class HeadUse(msgspec.Struct, frozen=True):
    """Use of a model's heads, or of its layers, on some rows.

    Attributes:
        kept: mean share of the coordinates, or layers, in use.
        score: mean score; None for a model without scores.
        spread: share of a head's variance of scores that is between inputs; 0 if they are the same for all inputs.
        by_head, deviations: mean and deviation of the scores between inputs, of each head of each layer.
    """

    kept: float
    score: float | None = None
    spread: float | None = None
    by_head: tuple[tuple[float, ...], ...] = ()
    deviations: tuple[tuple[float, ...], ...] = ()


def head_use(model: Head, rows: Rows) -> HeadUse | None:
    """Return the use of a model's heads on some rows; None for a model without scores."""
    modules = scored_modules(model.eval())
    if not modules:
        return None
    scores, kept = [], []
    with torch.no_grad():
        for indices in sorted_batches(rows.lengths, _BATCH):
            with recorded(module.scorer for module in modules) as states:
                outputs_of(model, rows.batch(indices))
            scores.append(torch.stack([states[module.scorer].returned for module in modules]))
            kept += [one.keep(of).mean(dim=(1, 2)) for one, of in zip(modules, scores[-1], strict=True)]
    every = torch.cat(scores, dim=1)  # [layers, n, H]
    within, whole = every.var(dim=1, correction=0).mean(), every.var(correction=0)
    spread = float(within / whole) if whole > 0 else 0.0
    by_head, deviations = (
        tuple(tuple(layer) for layer in of.tolist()) for of in (every.mean(dim=1), every.std(dim=1, correction=0))
    )
    return HeadUse(float(torch.cat(kept).mean()), float(every.mean()), spread, by_head, deviations)


def measure_files(
    dense: Head, dense_file: bytes, model: Head, rows: Rows, calibration: Rows, lengths: Sequence[int] = ()
) -> FileMeasures:
    """Measure the files of two models in turns, on ONNX Runtime, CPU, one thread.

    Args:
        dense_file: of the dense model, by :func:`export.quantize.calibration.plain_onnx`.
        rows: of dev.
        calibration: inputs for INT8.
        lengths: of inputs of random tokens, which are also timed.
    """
    plain = plain_onnx(model, rows)
    files = {"dense": fused(dense_file), "other": fused(plain)}
    if isinstance(model, SequenceClassifier) and not any(isinstance(one, GatedLayer) for one in model.modules()):
        files["int8"] = dynamic_int8(plain, calibration_feeds(calibration))
    batches = sorted_batches(rows.lengths, _BATCH_ROWS)
    dev, longest = calibration_feeds(rows, _TIMED_ROWS), feeds_of(rows, batches[0])
    batched = [feeds_of(rows, one) for one in batches[:: -(-len(batches) // _TIMED_BATCHES)]]
    sizes: list[tuple[int | None, int, list[dict[str, Array]]]] = [(None, 1, dev), (None, _BATCH_ROWS, batched)]
    sizes = [*((tokens, 1, [_random_feed(dense, dev[0], tokens)]) for tokens in lengths), *sizes]
    speeds, int8 = list[Speed](), None
    with ExitStack() as stack:
        runners = {name: OnnxRuntimeRunner(data, subject="a model to be timed") for name, data in files.items()}
        for runner in runners.values():
            stack.callback(runner.close)
        for tokens, number, feeds in sizes:
            turns = [times_in_turns(runners, feed, max(_LEAST_CALLS, _CALLS // len(feeds))) for feed in feeds]
            seconds = {name: sum(float(np.median(one[name])) for one in turns) for name in runners}
            counts = [sum(multiplications(one, feed) for feed in feeds) for one in (dense, model)]
            speeds.append(Speed(tokens, seconds["dense"] / seconds["other"], counts[0] / counts[1], number))
            if feeds is dev and "int8" in files:
                outputs = outputs_by_row(files["int8"], rows, subject="a model in INT8", rows_at_once=False)
                answers = predictions_of(outputs, rows.targets).answers
                int8 = Int8(tuple(answers.tolist()), seconds["dense"] / seconds["int8"])
    peaks = peak_bytes(files["dense"], longest), peak_bytes(files["other"], longest)
    return FileMeasures(tuple(speeds), peaks, int8)


def _random_feed(dense: Head, like: Mapping[str, Array], tokens: int) -> dict[str, Array]:
    ids = np.random.default_rng(0).integers(dense.transformer.config.vocab_size, size=(1, tokens))
    values = {"inputs": ids, "mask": np.ones_like(ids), "segments": np.zeros_like(ids)}
    return {name: values[name] for name in like}


def multiplications(model: nn.Module, feeds: Mapping[str, Array]) -> int:
    """Return the multiplications of a model for some inputs, with scorers and masked products."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(*map(torch.from_numpy, feeds.values()))
    return int(counter.get_total_flops()) // 2
