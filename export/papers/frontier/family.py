"""The runs of one task and seed: a teacher, and what imitates it, all by one recipe, labels and unlabelled text.

These are the dense encoder, the tiers, which were restored from it, and a control: the layers of a tier as they are in
the dense encoder, with heads and units by the usual calibration. All begin with one new head, as the teacher did. The
dense baseline is the better one of teacher and distilled dense model on the hold-out.
The files in static INT8 are those for TensorRT. They are not timed: ONNX Runtime computes them as their graphs say.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from edge.bench.timing import WARM_UP, times_in_turns, turns
from edge.datatypes import Array
from edge.files import write_whole
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.bundle.accuracy import outputs_by_row, predictions_of
from export.bundle.tier_files import static_int8
from export.data.examples import HOLDOUT
from export.data.tokens import Encoded, load_tokenizer
from export.finetune.models import open_model, open_tuned, with_head
from export.finetune.objectives import Teacher
from export.finetune.predictions import read_predictions
from export.finetune.recipe import FinetuningRecipe
from export.finetune.run import finetune_run, predict_splits, prepare, save_run
from export.finetune.task import Data, Reader, Task
from export.finetune.text_tasks import TASKS
from export.models.heads import SequenceClassifier
from export.papers.frontier.records import (
    DENSE,
    DENSE_RUNS,
    FP32,
    INT8,
    ONNX_FILES,
    STATIC,
    TEACHER,
    Answered,
    Family,
    Key,
    Sources,
    Timed,
    encoded,
    key_of,
)
from export.quantize.calibration import calibration_feeds, feeds_of, plain_onnx
from export.quantize.int8 import dynamic_int8
from export.quantize.precision import fused
from export.quantize.ranges import Scheme, input_ranges
from export.reduce.plan import LayerPlan, ReductionPlan, check_speedup, plan_of
from export.reduce.reduce import apply_plan
from export.reduce.target import CALIBRATION_EXAMPLES
from export.training.device import device_of
from export.training.provenance import processor, provenance
from export.training.runs import WEIGHTS
from export.training.trainer import Trained
from export.training.watch import Watch

#: Tokens of the length that all tasks share, calls of each file at that length, and items of dev that are timed.
FIXED_TOKENS, _FIXED_CALLS, _ITEMS = 128, 100, 300


class Inputs(NamedTuple):
    """Inputs of a family: where they are from, and the data in the tokens of the dense encoder."""

    task: Task
    sources: Sources
    reader: Reader
    data: Data


def inputs_of(family: Family, sources: Sources) -> Inputs:
    """Read the inputs of a family."""
    task, reader, frontier = TASKS[family.task], load_tokenizer(sources.model), family.settings.frontier
    data = prepare(
        *(task, sources.data_dir, reader),
        max_length=frontier.max_length,
        limit=family.of_task.limit,
        transfer=sources.transfer,
        most_transfer=frontier.transfer_texts,
    )
    return Inputs(task, sources, reader, data)


def train(family: Family, inputs: Inputs, directory: Path, watch: Watch) -> None:
    """Make the missing runs of a family; an unfinished one resumes."""
    frontier, runs = family.settings.frontier, _Runs(family, inputs, directory, watch)
    runs.teach(frontier.teaching(family.of_task))
    for name, source in {DENSE: inputs.sources.model, **inputs.sources.tiers}.items():
        runs.imitate(name, source)
    for name in family.controls:
        cut = directory / family.settings.cut_run
        if not runs.has(name):
            cut_out(family, inputs, inputs.sources.tiers[family.settings.control], cut)
            runs.imitate(name, cut)
        shutil.rmtree(cut, ignore_errors=True)


def cut_out(family: Family, inputs: Inputs, tier: Path, directory: Path) -> None:
    """Write a run with the layers of a tier as they are in the dense encoder, less heads and units if the tier has."""
    found, like = open_model(inputs.sources.model), open_model(tier)
    planned = like.config and like.config.planned
    assert planned
    config = found.transformer.config
    architecture = inputs.task.architecture(config, inputs.data.labels, family.settings.frontier.max_length)
    shapes = dict(zip(planned.kept, like.transformer.config.layers, strict=True))
    plan = plan_of(config, [shapes.get(number) for number in range(len(config.layers))])
    assert isinstance(inputs.data.train, Encoded)
    calibration = inputs.data.train.first(CALIBRATION_EXAMPLES)
    cut = apply_plan(with_head(found, architecture, family.seed), calibration, plan).model
    save_run(
        *(inputs.task, directory, cut),
        msgspec.structs.replace(architecture, transformer=cut.transformer.config),
        inputs.reader,
        predict_splits(inputs.task, cut, inputs.data, final=False),
        record=provenance(trainer=f"layers of {inputs.sources.model.name}", data=inputs.task.origin, seed=family.seed),
        tuned=Trained((), (), 0, 0, 0.0),
        planned=planned,
    )


def best_dense(task: Task, directory: Path) -> str:
    """Return the best dense run on the hold-out."""
    return max(DENSE_RUNS, key=lambda name: read_predictions(directory / name, HOLDOUT).score(task.headline))


class _Runs:
    """The runs of a family that are missing; the outputs of its teacher are computed once."""

    def __init__(self, family: Family, inputs: Inputs, directory: Path, watch: Watch) -> None:
        self._family, self._inputs, self._directory, self._watch = family, inputs, directory, watch
        self._outputs: tuple[Teacher, Teacher] | None = None  # on the training set, and on the unlabelled text

    def has(self, name: str) -> bool:
        return (self._directory / name / WEIGHTS).exists()

    def teach(self, recipe: FinetuningRecipe) -> None:
        data = msgspec.structs.replace(self._inputs.data, transfer=None, transfer_origin="")
        self._tune(TEACHER, self._inputs.sources.model, recipe, data)

    def imitate(self, name: str, source: Path) -> None:
        data, frontier, device = self._inputs.data, self._family.settings.frontier, self._family.settings.device
        if self._outputs is None and not self.has(name):
            model = open_tuned(self._directory / TEACHER, self._inputs.task.name).to(device_of(device))
            assert data.transfer
            layers = range(len(model.transformer.layers))
            train, transfer = (Teacher(model, rows, layers, frontier.precision) for rows in (data.train, data.transfer))
            self._outputs = train, transfer
        self._tune(name, source, frontier.imitating(self._family.of_task), data, *(self._outputs or ()))

    def _tune(self, name: str, source: Path, recipe: FinetuningRecipe, data: Data, *outputs: Teacher) -> None:
        if self.has(name):
            return
        inputs, (teacher, transfer_teacher) = self._inputs, outputs or (None, None)
        finetune_run(
            *(inputs.task, source, data, inputs.reader, self._directory / name, recipe),
            seed=self._family.seed,
            max_length=self._family.settings.frontier.max_length,
            data_dir=inputs.sources.data_dir,
            teacher=teacher,
            transfer_teacher=transfer_teacher,
            device=self._family.settings.device,
            observer=self._watch,
        )


def answer(family: Family, inputs: Inputs, directory: Path, watch: Watch) -> Answered:
    """Write the ONNX files of a trained family, and return what each answers to every item of dev, at batch 1.

    The control has a file in FP32 only.
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
        if run == DENSE or run in family.settings.tiers:
            files[INT8] = dynamic_int8(plain, calibration)
            files[STATIC] = static_int8(plain, input_ranges(plain, calibration, Scheme()))
        for precision, data in files.items():
            path = file_of(directory, (run, precision))
            write_whole(path, data)
            sizes[f"{run}/{precision}"] = len(data)
            outputs = outputs_by_row(data, dev, subject=path.name, rows_at_once=False)
            answers[run, precision] = predictions_of(outputs, dev.targets).answers
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
        gpu=torch.cuda.get_device_name() if family.settings.device == "cuda" else None,
        answers=encoded(answers, dev.targets),
    )


def file_of(directory: Path, key: Key) -> Path:
    """Return the ONNX file of a run in a precision."""
    return directory / ONNX_FILES / f"{'.'.join(key)}.onnx"


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
