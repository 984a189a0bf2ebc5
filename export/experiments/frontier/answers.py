"""Answers of a family: each run's ONNX files, and what they answer to every item of dev, at batch 1.

The files in static INT8 are those for TensorRT. They are not timed: ONNX Runtime computes them as their graphs say.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from edge.datatypes import Array
from edge.files import write_whole
from export.bundle.accuracy import predict_file
from export.data.tokens import Encoded
from export.finetune.models import open_tuned
from export.finetune.predictions import read_matching, read_predictions
from export.finetune.task import HOLDOUT
from export.models.heads import SequenceClassifier
from export.papers.frontier.family import FamilyInputs, best_dense, reduced_name
from export.papers.frontier.records import FP32, INT8, REDUCED, STATIC, Answered, Key, write_answers
from export.papers.frontier.settings import DENSE, DENSE_RUNS, FamilySettings
from export.quantize.calibration import calibration_feeds, plain_onnx
from export.quantize.dynamic import dynamic_int8
from export.quantize.precision import fused
from export.quantize.ranges import Scheme, input_ranges
from export.quantize.static import static_int8
from export.training.provenance import processor


def answer(
    family: FamilySettings,
    inputs: FamilyInputs,
    directory: Path,
    on_run: Callable[[int, int], None] = lambda done, runs: None,
) -> None:
    """Write the files of a trained family, and its predictions and their record; controls have FP32 files only."""
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
            files[INT8] = dynamic_int8(plain)
            files[STATIC] = static_int8(plain, input_ranges(plain, calibration, Scheme()))
        for precision, data in files.items():
            path = file_of(directory, (run, precision))
            write_whole(path, data)
            sizes[f"{run}/{precision}"] = len(data)
            answers[run, precision] = predict_file(data, dev, subject=path.name, rows_at_once=False).answers
        if run != DENSE:
            answers[run, REDUCED] = read_matching(directory / reduced_name(run), "dev", dev.targets).answers
        on_run(done + 1, len(family.runs))
    holdout = {run: read_predictions(directory / run, HOLDOUT) for run in dict.fromkeys((*family.runs, *DENSE_RUNS))}
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
        gpu=torch.cuda.get_device_name() if family.device == "cuda" else None,
    )
    write_answers(directory, record, answers, dev.targets)


def file_of(directory: Path, key: Key) -> Path:
    """Return the ONNX file of a run in a precision."""
    return directory / "onnx" / f"{'.'.join(key)}.onnx"
