"""Ways to quantise one run for TensorRT, each scored by the task's metric on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import onnx
from msgspec.structs import replace

from edge.errors import Raw, UsageError
from export.bundle.accuracy import outputs_by_row, predictions_of
from export.bundle.tier_files import static_int8
from export.finetune.image_tasks import ImageTask
from export.finetune.models import Architecture, open_model
from export.finetune.predictions import paired, read_matching
from export.finetune.run import prepare, task_of
from export.finetune.text_tasks import SentenceTask
from export.models.heads import Head
from export.quantize.calibration import calibration_feeds, feeds_of, plain_onnx
from export.quantize.int8 import dynamic_int8
from export.quantize.ranges import LARGEST, InputRange, input_ranges, projections
from export.quantize.training import trained_ranges
from export.training.intervals import Estimate
from export.training.provenance import Processor, processor, versions

#: Not a scheme for TensorRT, but the file for CPUs.
DYNAMIC = "dynamic"
#: The largest values of a batch with its padding.
_PADDED = "largest, padded"
_SCHEMES = {
    _PADDED: LARGEST,
    "largest": LARGEST,
    "smoothed, largest": replace(LARGEST, smoothing=0.5),
    "largest, down in FP16": replace(LARGEST, fp16=("down",)),
    "smoothed, largest, down in FP16": replace(LARGEST, smoothing=0.5, fp16=("down",)),
}
METHODS = (DYNAMIC, *_SCHEMES)


class Scored(msgspec.Struct, frozen=True):
    """One way, on one split.

    Attributes:
        int8_share: of the multiplications in the products with weights of all layers.
        value: the task's headline metric.
        difference: to the run in FP32, with its paired interval over the items.
        logits_error: root mean square of the difference to the FP32 logits, over their standard deviation.
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
    trained: Sequence[Path] = (),
    *,
    split: str,
    calibration_rows: int,
    on_file: Callable[[str, int, int], None] = lambda method, done, rows: None,
) -> Int8Comparison:
    """Quantise a run in several ways, and score each file on a split.

    Args:
        methods: of :data:`METHODS`; none is all of them, unless there are runs in ``trained``.
        trained: runs of ``fewheads finetune --int8`` with the same task, labels and layers.
        split: ``holdout``, or one of dev; the training set calibrates.
        on_file: called with the method, the rows that are done, and all rows.

    Raises:
        UsageError: the run is no classifier or regression in FP32, one of ``trained`` was not trained for INT8 or has
            another task, other labels or other layers, or there is no such method or split.
    """
    for method in methods:
        if method not in METHODS:
            fix = "Leave --method out for all of them."
            raise UsageError("--method", given=method, expected=f"one of {'; '.join(METHODS)}", fix=fix)
    model = open_model(run)
    task, head, architecture = task_of(model, run), model.head, model.architecture
    if not isinstance(task, SentenceTask | ImageTask) or head is None or architecture is None:
        given, fix = Raw(f"a run on {task.name}"), "Give a run of 'fewheads finetune' with classes or a score."
        raise UsageError(f"run {run}", given=given, expected="a classifier or regression", fix=fix)
    if model.int8:
        given, fix = Raw("a run that was trained for INT8"), "Give the run it was made of, and it as --trained."
        raise UsageError(f"run {run}", given=given, expected="a run in FP32, to compare with", fix=fix)
    tuned = {f"trained: {path.name}": _trained(path, architecture) for path in trained}
    data = prepare(task, data_dir, task.reader(run), max_length=architecture.max_length, limit=None)
    if split not in data.measured:
        raise UsageError("--split", given=split, expected=f"one of {', '.join(data.measured)}", fix="Give one of them.")
    rows, plain, scored = data.measured[split], plain_onnx(head, data.train), []
    fp32 = read_matching(run, split, rows.targets)
    for method in (*(methods or (() if trained else METHODS)), *tuned):
        if method == DYNAMIC:
            share, file = 1.0, dynamic_int8(plain)
        else:
            source = plain
            if method in tuned:
                source, ranges = plain_onnx(tuned[method][0], data.train), trained_ranges(tuned[method][1])
            elif method == _PADDED:
                number = min(calibration_rows, len(data.train.targets))
                numbers = np.linspace(0, len(data.train.targets) - 1, number).astype(int)
                ranges = input_ranges(plain, [feeds_of(data.train, numbers)], _SCHEMES[method])
            else:
                ranges = input_ranges(plain, calibration_feeds(data.train, calibration_rows), _SCHEMES[method])
            share, file = _share(source, ranges), static_int8(source, ranges)
        at_once, on_rows = method != DYNAMIC, partial(on_file, method)
        outputs = outputs_by_row(file, rows, subject=method, rows_at_once=at_once, on_rows=on_rows)
        answers = predictions_of(outputs, rows.targets)
        error = float(np.sqrt(np.square(answers.logits - fp32.logits).mean()) / fp32.logits.std())
        change = paired(task.headline, [answers], [fp32])
        scored.append(Scored(method, share, answers.score(task.headline), change, error))
    return Int8Comparison(
        *(run.name, task.name, task.headline, split, len(rows.targets), fp32.score(task.headline), calibration_rows),
        *(tuple(scored), processor(), versions()),
    )


def _trained(run: Path, expected: Architecture) -> tuple[Head, dict[str, float]]:
    """Return a model that was trained for INT8, and the largest inputs of its products."""
    model = open_model(run)
    fix = "Give a run of 'fewheads finetune --int8' whose --model was RUN."
    if not model.int8 or model.head is None:
        raise UsageError(f"--trained {run}", given=Raw("a run in FP32"), expected="one for INT8", fix=fix)
    if model.architecture != expected:
        given = Raw("a run with another task, or other labels or layers")
        raise UsageError(f"--trained {run}", given=given, expected="the task, labels and layers of RUN", fix=fix)
    return model.head, model.int8


def _share(plain: bytes, ranges: dict[str, InputRange]) -> float:
    model = onnx.load_from_string(plain)
    sizes = {tensor.name: int(np.prod(tensor.dims)) for tensor in model.graph.initializer}
    products = {node.name: sizes[node.input[1]] for node in projections(model, has_head=True)}
    return sum(products[name] for name in ranges) / sum(products.values())
