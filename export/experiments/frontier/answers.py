"""Answers of a family: each run's ONNX files, and what they answer to every item of dev, at batch 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from edge.datatypes import Array
from edge.files import write_whole
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.convert import to_onnx
from export.experiments.frontier.family import FamilyInputs, better_dense
from export.experiments.frontier.records import Answered, Key, write_answers
from export.experiments.frontier.settings import DENSE, FamilySettings
from export.heads import SequenceClassifier
from export.precision import fused
from export.processor import processor
from export.quantization.dynamic import dynamic_int8
from export.tasks.models import open_tuned
from export.tasks.predictions import read_predictions
from export.tasks.task import HOLDOUT
from export.tasks.tokens import Encoded

FP32, INT8 = "fp32", "int8"


def answer(
    family: FamilySettings,
    inputs: FamilyInputs,
    directory: Path,
    on_run: Callable[[int, int], None] = lambda done, runs: None,
) -> None:
    """Write the files of a trained family, and its predictions and their record; controls have FP32 files only."""
    task, dev = inputs.task, inputs.data.dev["dev"]
    assert isinstance(dev, Encoded)
    dense = better_dense(task, directory)
    answers: dict[Key, Array] = {}
    sizes: dict[str, int] = {}
    layers, dim = {}, 0
    for done, run in enumerate(family.runs):
        model = open_tuned(directory / (dense if run == DENSE else run), task.name)
        assert isinstance(model, SequenceClassifier)
        layers[run], dim = model.transformer.config.layers, model.transformer.config.dim
        plain = _to_onnx(model, dev)
        files = {FP32: fused(plain)}
        if run == DENSE or run in family.frontier.tiers:
            files[INT8] = dynamic_int8(plain)
        for precision, data in files.items():
            path = file_of(directory, (run, precision))
            write_whole(path, data)
            sizes[f"{run}/{precision}"] = len(data)
            answers[run, precision] = _answers(data, dev, path.name)
        on_run(done + 1, len(family.runs))
    holdout = {run: read_predictions(directory / run, HOLDOUT) for run in (*family.runs, "teacher")}
    record = Answered(
        settings=family,
        dense=dense,
        holdout={run: found.score(task.headline) for run, found in holdout.items()},
        holdout_items=len(inputs.data.holdout.targets),
        items=len(dev.tokens),
        mean_tokens=float(dev.lengths.mean()),
        dim=dim,
        layers=layers,
        file_bytes=sizes,
        processor=processor(),
    )
    write_answers(directory, record, answers, dev.targets)


def file_of(directory: Path, key: Key) -> Path:
    """Return the ONNX file of a run in a precision."""
    return directory / "onnx" / f"{'.'.join(key)}.onnx"


def feeds_of_items(dev: Encoded, items: Array) -> Iterator[dict[str, Array]]:
    """Yield the inputs of items, one by one and without padding."""
    for item in items:
        batch = dev.batch(np.array([item]))
        yield {name: tensor.numpy() for name, tensor in batch.named.items()}


def _answers(data: bytes, dev: Encoded, subject: str) -> Array:
    runner = OnnxRuntimeRunner(data, subject=subject)
    try:
        logits = [runner.infer(feeds)["logits"][0] for feeds in feeds_of_items(dev, np.arange(len(dev.tokens)))]
    finally:
        runner.close()
    return np.array([row[0] if len(row) == 1 else row.argmax() for row in logits], np.float64)


def _to_onnx(model: SequenceClassifier, dev: Encoded) -> bytes:
    inputs = dev.batch(np.arange(2)).named
    dynamic = {name: {0: "batch", 1: "length"} for name in inputs}
    return to_onnx(model, inputs, ["logits"], dynamic)
