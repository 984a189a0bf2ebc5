"""The runs of one task and seed: a teacher, two dense models that imitate it, leaner tiers, and controls.

Tiers and controls are reduced from the teacher and imitate it, all by one recipe, for the same epochs, on the same
examples; so is one of the dense models. The dense baseline is the best of teacher and dense models on the hold-out.
The files in static INT8 are those for TensorRT. They are not timed: ONNX Runtime computes them as their graphs say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from edge.bench.layer_latencies import LayerLatencies
from edge.bench.timing import WARM_UP, times_in_turns, turns
from edge.datatypes import Array
from edge.errors import UsageError
from edge.files import write_whole
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.bundle.accuracy import outputs_by_row, predictions_of
from export.bundle.tier_files import static_int8
from export.data.examples import HOLDOUT
from export.data.tokens import Encoded, load_tokenizer
from export.finetune.models import open_model, open_tuned
from export.finetune.objectives import Teacher
from export.finetune.predictions import read_matching, read_predictions
from export.finetune.recipe import Recipe
from export.finetune.run import finetune_run, prepare
from export.finetune.task import Data, Reader, Task
from export.finetune.text_tasks import TASKS
from export.models.heads import SequenceClassifier
from export.papers.frontier.records import (
    DENSE,
    DENSE_AS_REDUCED,
    DENSE_RUNS,
    FP32,
    INT8,
    REDUCED,
    STATIC,
    TEACHER,
    Answered,
    Family,
    Key,
    Timed,
    control_name,
    encoded,
    key_of,
)
from export.quantize.calibration import calibration_feeds, feeds_of, plain_onnx
from export.quantize.int8 import dynamic_int8
from export.quantize.precision import fused
from export.quantize.ranges import Scheme, input_ranges
from export.reduce.grid import grid_of
from export.reduce.latency import measure_times
from export.reduce.plan import LayerPlan, ReductionPlan, check_speedup
from export.reduce.run import reduce_run
from export.reduce.target import LATENCIES, Strategy
from export.training.device import device_of
from export.training.points import Point
from export.training.provenance import processor
from export.training.runs import PREDICTIONS, WEIGHTS
from export.training.watch import Watch

#: Tokens of the length that all tasks share, calls of each file at that length, and items of dev that are timed.
FIXED_TOKENS, _FIXED_CALLS, _ITEMS = 128, 100, 300


class Inputs(NamedTuple):
    """Inputs of a family: the initial model, and the data in its tokens."""

    task: Task
    model: Path
    reader: Reader
    data_dir: Path
    data: Data


def inputs_of(family: Family, model: Path, data_dir: Path) -> Inputs:
    """Read the inputs of a family."""
    task, reader = TASKS[family.task], load_tokenizer(model)
    data = prepare(task, data_dir, reader, max_length=family.frontier.max_length, limit=family.of_task.limit)
    return Inputs(task, model, reader, data_dir, data)


def time_shapes(model: Path, out: Path, tokens: int, on_shape: Callable[[int, int], None]) -> None:
    """Time the shapes of layers that reductions choose from, before anything else runs; one table serves all families.

    Args:
        out: the directory of the families. A complete table that is there stays, also one of another machine: all
            families are reduced by the same times.
    """
    with suppress(UsageError):  # missing or broken
        if LayerLatencies.read(out / LATENCIES).find_rest(tokens):  # timed last
            return
    head = SequenceClassifier(open_model(model).transformer, labels=2).eval()
    measure_times(head, grid_of(head.transformer.config), [Point(tokens)], cache=out / LATENCIES, on_shape=on_shape)


def train(family: Family, inputs: Inputs, directory: Path, watch: Watch) -> None:
    """Make the missing runs of a family; an unfinished one resumes."""
    frontier, runs = family.frontier, _Runs(family, inputs, directory, watch)
    runs.tune(TEACHER, inputs.model, frontier.teaching(family.of_task), None)
    runs.imitate(DENSE, TEACHER, frontier.imitating(family.of_task))
    restoring = frontier.restoring(family.of_task)
    runs.imitate(DENSE_AS_REDUCED, TEACHER, restoring)
    lean: list[tuple[str, float, Strategy]] = [(tier, speedup, "search") for tier, speedup in frontier.tiers.items()]
    speedup = frontier.tiers[frontier.control_tier]
    lean += [(control_name(frontier, control), speedup, control) for control in family.controls]
    for name, speedup, strategy in lean:
        if runs.has(name):
            continue
        reduced = reduced_name(name)
        runs.reduce(reduced, speedup, strategy)
        runs.imitate(name, reduced, restoring)
        for path in (directory / reduced).iterdir():  # half of a family's bytes
            if path.name != PREDICTIONS:
                path.unlink()


def reduced_name(run: str) -> str:
    """Return the name of a tier or control before its distillation."""
    return f"{run}-reduced"


def best_dense(task: Task, directory: Path) -> str:
    """Return the best dense run on the hold-out."""
    return max(DENSE_RUNS, key=lambda name: read_predictions(directory / name, HOLDOUT).score(task.headline))


class _Runs:
    """The runs of a family that are missing; the outputs of its teacher are computed once."""

    def __init__(self, family: Family, inputs: Inputs, directory: Path, watch: Watch) -> None:
        self._family, self._inputs, self._directory, self._watch = family, inputs, directory, watch
        self._teacher: Teacher | None = None

    def has(self, name: str) -> bool:
        return (self._directory / name / WEIGHTS).exists()

    def imitate(self, name: str, source: str, recipe: Recipe) -> None:
        if self.has(name):
            return
        if self._teacher is None:
            model = open_tuned(self._directory / TEACHER, self._inputs.task.name).to(device_of(self._family.device))
            layers = range(len(model.transformer.layers))
            self._teacher = Teacher(model, self._inputs.data.train, layers, self._family.frontier.precision)
        self.tune(name, self._directory / source, recipe, self._teacher)

    def tune(self, name: str, source: Path, recipe: Recipe, teacher: Teacher | None) -> None:
        if self.has(name):
            return
        inputs = self._inputs
        finetune_run(
            *(inputs.task, source, inputs.data, inputs.reader, self._directory / name, recipe),
            seed=self._family.seed,
            max_length=self._family.frontier.max_length,
            data_dir=inputs.data_dir,
            teacher=teacher,
            device=self._family.device,
            observer=self._watch,
        )

    def reduce(self, name: str, speedup: float, strategy: Strategy) -> None:
        if self.has(name):
            return
        report = reduce_run(
            self._directory / TEACHER,
            self._inputs.data_dir,
            self._directory / name,
            speedup,
            points=[Point(self._family.frontier.tokens)],
            examples=self._family.of_task.calibration,
            target=self._directory.parent / LATENCIES,
            strategy=strategy,
            seed=self._family.seed,
            final=True,  # for the scores before distillation
            on_progress=self._watch.on_part,
        )
        write_whole(self._directory / f"{name}.json", msgspec.json.format(msgspec.json.encode(report), indent=1))


def answer(family: Family, inputs: Inputs, directory: Path, watch: Watch) -> Answered:
    """Write the ONNX files of a trained family, and return what each answers to every item of dev, at batch 1.

    Controls have files in FP32 only.
    """
    task, dev = inputs.task, inputs.data.dev["dev"]
    assert isinstance(dev, Encoded)
    calibration = calibration_feeds(inputs.data.train)
    dense = best_dense(task, directory)
    answers: dict[Key, Array] = {}
    sizes: dict[str, int] = {}
    layers, dim = {}, 0
    for done, run in enumerate(family.runs):
        model = open_tuned(directory / (dense if run == DENSE else run), task.name)
        assert isinstance(model, SequenceClassifier)
        layers[run], dim = model.transformer.config.layers, model.transformer.config.dim
        plain = plain_onnx(model, dev)
        files = {FP32: fused(plain)}
        if run == DENSE or run in family.frontier.tiers:
            files[INT8] = dynamic_int8(plain, calibration)
            files[STATIC] = static_int8(plain, input_ranges(plain, calibration, Scheme()))
        for precision, data in files.items():
            path = file_of(directory, (run, precision))
            write_whole(path, data)
            sizes[f"{run}/{precision}"] = len(data)
            outputs = outputs_by_row(data, dev, subject=path.name, rows_at_once=False)
            answers[run, precision] = predictions_of(outputs, dev.targets).answers
        if run != DENSE:
            answers[run, REDUCED] = read_matching(directory / reduced_name(run), "dev", dev.targets).answers
        watch.on_part("runs", done + 1, len(family.runs))
    holdout = {run: read_predictions(directory / run, HOLDOUT) for run in dict.fromkeys((*family.runs, *DENSE_RUNS))}
    return Answered(
        task=family.task,
        seed=family.seed,
        dense=dense,
        holdout={run: predicted.score(task.headline) for run, predicted in holdout.items()},
        holdout_items=len(inputs.data.holdout.targets),
        items=len(dev.tokens),
        mean_tokens=float(dev.lengths.mean()),
        dim=dim,
        layers=layers,
        file_bytes=sizes,
        processor=processor(),
        gpu=torch.cuda.get_device_name() if family.device == "cuda" else None,
        answers=encoded(answers, dev.targets),
    )


def file_of(directory: Path, key: Key) -> Path:
    """Return the ONNX file of a run in a precision."""
    return directory / "onnx" / f"{'.'.join(key)}.onnx"


def time_files(answered: Answered, inputs: Inputs, directory: Path, watch: Watch) -> Timed:
    """Time the files of a family, one thread, batch 1, each item on every file in turns of random order.

    Drifts of clocks and other work then affect all files alike.

    Raises:
        PlanError: a run is faster than the removed multiplications can explain, against the dense model in the same
            precision: the machine was too busy.
    """
    dev = inputs.data.dev["dev"]
    assert isinstance(dev, Encoded)
    keys = [key for key in map(key_of, answered.file_bytes) if key[1] != STATIC]
    runners = {key: OnnxRuntimeRunner(file_of(directory, key).read_bytes(), subject=" ".join(key)) for key in keys}
    try:
        seconds = _timed(runners, dev, answered.seed, watch)
        fixed = times_in_turns(runners, _fixed_feeds(dev), _FIXED_CALLS)
    finally:
        for runner in runners.values():
            runner.close()
    dense = DENSE, FP32
    speedups, fixed_speedups = (
        {key: float(np.median(times[dense] / times[key])) for key in keys} for times in (seconds, fixed)
    )
    for run, precision in keys:
        left_out = [None] * (len(answered.layers[DENSE]) - len(answered.layers[run]))
        layers = (*(LayerPlan(shape) for shape in answered.layers[run]), *left_out)
        plan = ReductionPlan(answered.dim, answered.layers[DENSE], layers)
        for tokens, ratios in ((round(answered.mean_tokens), speedups), (FIXED_TOKENS, fixed_speedups)):
            check_speedup(plan, tokens, ratios[run, precision] / ratios[DENSE, precision])
    return Timed(
        speedups={"/".join(key): value for key, value in speedups.items()},
        fixed_speedups={"/".join(key): value for key, value in fixed_speedups.items()},
        median_ms={"/".join(key): float(1e3 * np.median(seconds[key])) for key in keys},
        items=len(seconds[dense]),
        processor=processor(),
    )


def _timed(runners: Mapping[Key, OnnxRuntimeRunner], dev: Encoded, seed: int, watch: Watch) -> dict[Key, Array]:
    """Return the seconds of each file for the timed items, [items]."""
    items = np.random.default_rng(seed).permutation(len(dev.tokens))[:_ITEMS]
    seconds = {key: np.zeros(len(items)) for key in runners}
    warm_up = items[:WARM_UP]
    for position, item in enumerate(np.concatenate([warm_up, items]), -len(warm_up)):
        feeds = feeds_of(dev, np.array([item]))
        for key in turns(list(runners), position):
            started = time.perf_counter()
            runners[key].infer(feeds)
            if position >= 0:
                seconds[key][position] = time.perf_counter() - started
        watch.on_part("items", max(0, position + 1), len(items))
    return seconds


def _fixed_feeds(dev: Encoded) -> dict[str, Array]:
    """Return one input of :data:`FIXED_TOKENS` tokens, taken from the start of dev."""
    tokens = np.concatenate(dev.tokens)
    ids = np.resize(tokens, (1, FIXED_TOKENS)).astype(np.int64)
    return {"inputs": ids, "mask": np.ones_like(ids), "segments": np.zeros_like(ids)}
