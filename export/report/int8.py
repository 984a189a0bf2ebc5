"""Ways to quantise one run for TensorRT, each scored by the task's metric on ONNX Runtime.

A model that embeds sentences is scored by Spearman's correlation of its cosines with the scores of STS-B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import onnx
from msgspec.structs import replace
from onnx import TensorProto

from edge.errors import UsageError
from export.bundle.accuracy import outputs_by_row
from export.bundle.tier_files import static_int8
from export.finetune.predictions import paired
from export.quantize.calibration import calibration_feeds, plain_onnx
from export.quantize.int8 import dynamic_int8
from export.quantize.ranges import LARGEST, Scheme, input_ranges, projections
from export.report.scored_runs import scored_run
from export.training.intervals import Estimate
from export.training.provenance import Processor, processor, versions

#: Not a scheme for TensorRT, but the file for CPUs.
DYNAMIC = "dynamic"
_SCHEMES = {
    "largest": LARGEST,
    "smoothed, largest": replace(LARGEST, smoothing=0.5),
    "largest, down in FP16": replace(LARGEST, fp16=("down",)),
    "smoothed, largest, down in FP16": replace(LARGEST, smoothing=0.5, fp16=("down",)),
    "smoothed, largest, down and output_proj in FP16": Scheme(),
}
METHODS = (DYNAMIC, *_SCHEMES)


class Scored(msgspec.Struct, frozen=True):
    """One way, on one split.

    Attributes:
        int8_share: of the multiplications in the products with weights of all layers.
        value: the task's headline metric.
        difference: to the run in FP32, with its paired interval over the items.
        logits_error: root mean square of the difference to the logits in FP32, or cosines, over their standard
            deviation.
    """

    method: str
    int8_share: float
    value: float
    difference: Estimate
    logits_error: float


class Int8Comparison(msgspec.Struct, frozen=True):
    """All ways for one run, on one split."""

    run: str
    task: str
    metric: str
    split: str
    n: int
    fp32: float
    calibration_rows: int
    scored: tuple[Scored, ...]
    processor: Processor
    versions: dict[str, str]


def compare_int8(
    run: Path,
    data_dir: Path,
    methods: Sequence[str],
    *,
    split: str,
    calibration_rows: int,
    on_file: Callable[[str, int, int], None] = lambda method, done, rows: None,
) -> Int8Comparison:
    """Quantise a run in several ways, and score each file on a split.

    Args:
        methods: of :data:`METHODS`; none is all of them.
        split: ``holdout``, or one of dev; the training set calibrates.
        on_file: called with the method, the rows that are done, and all rows.

    Raises:
        UsageError: the run is no classifier or regression, or of INT8, or there is no such method or split.
    """
    for method in methods:
        if method not in METHODS:
            fix = "Leave --method out for all of them."
            raise UsageError("--method", given=method, expected=f"one of {'; '.join(METHODS)}", fix=fix)
    one = scored_run(run, data_dir, split, calibration_rows)
    plain, feeds, scored = plain_onnx(one.head, one.train), calibration_feeds(one.train, calibration_rows), []
    fp32 = one.fp32(plain, partial(on_file, "FP32"))
    for method in methods or METHODS:
        if method == DYNAMIC:
            file = dynamic_int8(plain, feeds)
        else:
            file = static_int8(plain, input_ranges(plain, feeds, _SCHEMES[method]))
        at_once, on_rows = method != DYNAMIC, partial(on_file, method)
        outputs = outputs_by_row(file, one.rows, subject=method, rows_at_once=at_once, on_rows=on_rows)
        answers = one.predictions(outputs)
        error = float(np.sqrt(np.square(answers.logits - fp32.logits).mean()) / fp32.logits.std())
        change = paired(one.metric, [answers], [fp32])
        scored.append(Scored(method, _share(plain, file), answers.score(one.metric), change, error))
    return Int8Comparison(
        *(run.name, one.task, one.metric, split, len(one.targets), fp32.score(one.metric), calibration_rows),
        *(tuple(scored), processor(), versions()),
    )


def _share(plain: bytes, file: bytes) -> float:
    """Return the share of the weights of all layers' products that a file has in INT8."""
    whole, quantised = (onnx.load_from_string(data) for data in (plain, file))
    sizes = {tensor.name: int(np.prod(tensor.dims)) for tensor in whole.graph.initializer}
    every = sum(sizes[node.input[1]] for node in projections(whole, has_head=True))
    weights = (one for one in quantised.graph.initializer if one.data_type == TensorProto.INT8 and len(one.dims) > 1)
    return sum(int(np.prod(one.dims)) for one in weights) / every
