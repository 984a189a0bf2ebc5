"""Ways to quantise one run for TensorRT, each scored by the task's metric on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import onnx
from msgspec.structs import replace

from edge.datatypes import Array
from edge.errors import Raw, UsageError
from export.bundle.accuracy import predict_file
from export.data.tokens import Rows
from export.finetune.image_tasks import ImageTask
from export.finetune.models import Architecture, open_model
from export.finetune.objectives import Head
from export.finetune.predictions import paired, read_matching
from export.finetune.run import prepare, task_of
from export.finetune.text_tasks import SentenceTask
from export.quantize.calibration import calibration_feeds, feeds_of, plain_onnx
from export.quantize.dynamic import dynamic_int8
from export.quantize.projections import projections
from export.quantize.ranges import LARGEST, InputRange, Scheme, input_ranges
from export.quantize.static import static_int8
from export.quantize.training import trained_ranges
from export.training.intervals import Estimate
from export.training.provenance import Processor, processor, versions

#: Not a scheme for TensorRT, but the file for CPUs.
DYNAMIC = "dynamic"
#: The largest values of a batch with its padding.
PADDED = "largest, padded"
TRAINED = "trained"
SCHEMES = {
    PADDED: LARGEST,
    "largest": LARGEST,
    **{f"percentile {share}": replace(LARGEST, clip="percentile", percentile=share) for share in (99.9, 99.99, 99.999)},
    "error": replace(LARGEST, clip="error"),
    "smoothed, largest": replace(LARGEST, smoothing=0.5),
    "smoothed, error": replace(LARGEST, clip="error", smoothing=0.5),
    "largest, down in FP16": replace(LARGEST, fp16=("down",)),
    "smoothed, largest, down in FP16": replace(LARGEST, smoothing=0.5, fp16=("down",)),
    "smoothed, error, down in FP16": Scheme(clip="error", smoothing=0.5, fp16=("down",)),
}
METHODS = (DYNAMIC, *SCHEMES)


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


class Comparison(msgspec.Struct, frozen=True):
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


class _Trained(NamedTuple):
    """A model that was trained for INT8, and the ranges of the inputs of its products."""

    head: Head
    largest: dict[str, float]


def check_methods(methods: Sequence[str]) -> None:
    """Raise a UsageError for a name that is not in :data:`METHODS`."""
    for method in methods:
        if method not in METHODS:
            fix = "Leave --method out for all of them."
            raise UsageError("--method", given=method, expected=f"one of {'; '.join(METHODS)}", fix=fix)


def compare_int8(
    run: Path,
    data_dir: Path,
    methods: Sequence[str],
    trained: Sequence[Path] = (),
    *,
    split: str,
    calibration_rows: int,
    on_file: Callable[[str, int, int], None] = lambda method, done, rows: None,
) -> Comparison:
    """Quantise a run in several ways, and score each file on a split.

    Args:
        methods: of :data:`METHODS`.
        trained: runs of ``fewheads finetune --int8`` with the same task, labels and layers.
        split: ``holdout``, or one of dev; the training set calibrates.
        on_file: called with the method, the rows that are done, and all rows.

    Raises:
        UsageError: the run is no classifier or regression in FP32, one of ``trained`` was not trained for INT8 or has
            another task, other labels or other layers, or there is no such split.
    """
    found = open_model(run)
    task = task_of(found, run)
    if not isinstance(task, SentenceTask | ImageTask) or found.head is None or found.architecture is None:
        given, fix = Raw(f"a run on {task.name}"), "Give a run of 'fewheads finetune' with classes or a score."
        raise UsageError(f"run {run}", given=given, expected="a classifier or regression", fix=fix)
    if found.int8:
        given, fix = (
            Raw("a run that was trained for INT8"),
            "Give the run that it was made of, and it as --trained.",
        )
        raise UsageError(f"run {run}", given=given, expected="a run in FP32, to compare with", fix=fix)
    others = {f"{TRAINED}: {path.name}": _trained(path, found.architecture) for path in trained}
    data = prepare(task, data_dir, task.reader(run), max_length=found.architecture.max_length, limit=None)
    if split not in data.measured:
        raise UsageError("--split", given=split, expected=f"one of {', '.join(data.measured)}", fix="Give one of them.")
    rows = data.measured[split]
    fp32 = read_matching(run, split, rows.targets)
    plain = plain_onnx(found.head, data.train)
    scored = []
    for method in (*methods, *others):
        if method == DYNAMIC:
            share, file = 1.0, dynamic_int8(plain)
        else:
            source = plain
            if method in others:
                source, ranges = plain_onnx(others[method].head, data.train), trained_ranges(others[method].largest)
            else:
                feeds = _padded if method == PADDED else calibration_feeds
                ranges = input_ranges(plain, feeds(data.train, calibration_rows), SCHEMES[method])
            share, file = _share(source, ranges), static_int8(source, ranges)
        answers = predict_file(
            file,
            rows,
            subject=method,
            rows_at_once=method != DYNAMIC,
            on_rows=partial(on_file, method),
        )
        difference = answers.logits - fp32.logits
        error = float(np.sqrt(np.square(difference).mean()) / fp32.logits.std())
        change = paired(task.headline, [answers], [fp32])
        scored.append(Scored(method, share, answers.score(task.headline), change, error))
    return Comparison(
        run=run.name,
        task=task.name,
        metric=task.headline,
        split=split,
        n=len(rows.targets),
        fp32=fp32.score(task.headline),
        calibration_rows=calibration_rows,
        scored=tuple(scored),
        processor=processor(),
        versions=versions(),
    )


def _padded(rows: Rows, number: int) -> list[dict[str, Array]]:
    places = np.linspace(0, len(rows.targets) - 1, min(number, len(rows.targets))).astype(int)
    return [feeds_of(rows, places)]


def _trained(run: Path, expected: Architecture) -> _Trained:
    found = open_model(run)
    fix = "Give a run of 'fewheads finetune --int8' whose --model was RUN."
    if not found.int8 or found.head is None:
        raise UsageError(f"--trained {run}", given=Raw("a run in FP32"), expected="one for INT8", fix=fix)
    if found.architecture != expected:
        given = Raw("a run with another task, or other labels or layers")
        raise UsageError(f"--trained {run}", given=given, expected="the task, labels and layers of RUN", fix=fix)
    return _Trained(found.head, found.int8)


def _share(plain: bytes, ranges: dict[str, InputRange]) -> float:
    model = onnx.load_from_string(plain)
    sizes = {tensor.name: int(np.prod(tensor.dims)) for tensor in model.graph.initializer}
    products = {node.name: sizes[node.input[1]] for node in projections(model, has_head=True)}
    return sum(products[name] for name in ranges) / sum(products.values())
