"""What is measured of a changed model: the use of its heads or layers, and its speed beside the dense one's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import msgspec
import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from edge.bench.timing import times_in_turns
from edge.datatypes import Array
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.data.tokens import Rows, sorted_batches
from export.finetune.objectives import outputs_of
from export.models.heads import SequenceClassifier
from export.models.recorded import recorded
from export.papers.adaptive.scores import scored_modules
from export.quantize.calibration import calibration_feeds, plain_onnx
from export.quantize.precision import fused
from export.reduce.latency import feeds_of, measure_models

_BATCH = 64
#: Rows of dev that are timed, and calls for each.
_TIMED_ROWS, _TIMED_CALLS = 64, 10


class Speed(msgspec.Struct, frozen=True):
    """Dense time over a model's time, in turns, and the bound: the dense model's multiplications over its own.

    Attributes:
        tokens: of the input; None for rows of dev, each with its own length.
    """

    tokens: int | None
    ratio: float
    bound: float


class HeadUse(msgspec.Struct, frozen=True):
    """Use of a model's heads, or of its layers, on some rows.

    Attributes:
        kept: mean share of the coordinates, or layers, in use.
        score: mean score; None for a model without scores.
        spread: share of a head's variance of scores that is between inputs; 0 if they are the same for all inputs.
    """

    kept: float
    score: float | None = None
    spread: float | None = None


def head_use(model: SequenceClassifier, rows: Rows) -> HeadUse | None:
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
    return HeadUse(float(torch.cat(kept).mean()), float(every.mean()), float(within / whole) if whole > 0 else 0.0)


def speed(dense: SequenceClassifier, model: nn.Module, tokens: int) -> Speed:
    """Time a model on ONNX Runtime, CPU, one thread, in turns with the dense one, on an input of some tokens."""
    feeds = feeds_of(dense.transformer.config, tokens)
    measured = measure_models(dense, model, feeds)
    return Speed(tokens, measured.ratio, multiplications(dense, feeds) / multiplications(model, feeds))


def speed_on(dense: SequenceClassifier, model: SequenceClassifier, rows: Rows) -> Speed:
    """Time a model as :func:`speed` on real rows, one at a time; each file is the one that a bundle has in FP32."""
    feeds = calibration_feeds(rows, _TIMED_ROWS)
    files = {name: fused(plain_onnx(one, rows)) for name, one in (("dense", dense), ("other", model))}
    medians: dict[str, list[float]] = {name: [] for name in files}
    with ExitStack() as stack:
        runners = {name: OnnxRuntimeRunner(data, subject="a model to be timed") for name, data in files.items()}
        for runner in runners.values():
            stack.callback(runner.close)
        for feed in feeds:
            for name, seconds in times_in_turns(runners, feed, _TIMED_CALLS).items():
                medians[name].append(float(np.median(seconds)))
    counts = [sum(multiplications(one, feed) for feed in feeds) for one in (dense, model)]
    return Speed(None, sum(medians["dense"]) / sum(medians["other"]), counts[0] / counts[1])


def multiplications(model: nn.Module, feeds: Mapping[str, Array]) -> int:
    """Return the multiplications of a model for some inputs, with scorers and masked products."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(*map(torch.from_numpy, feeds.values()))
    return int(counter.get_total_flops()) // 2
