"""Measurement of a family: every tier in FP32 and INT8 on ONNX Runtime, one thread, batch 1, in turns.

Each item of dev is run on every tier before the next item, so that drifts of clocks and other work affect all tiers
alike. The same pass gives predictions and times.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from edge.datatypes import Array
from edge.errors import Literally
from edge.files import write_whole
from edge.profiling.timing import WARM_UP, times_in_turns, turns
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.convert import to_onnx
from export.errors import CheckpointError
from export.experiments.family import DENSE, TEACHER, TIERS
from export.heads import SequenceClassifier
from export.precision import fused
from export.processor import Processor, processor
from export.quantization.dynamic import dynamic_int8
from export.reduction.latency import feeds_of
from export.reduction.plan import Plan, check_speedup
from export.tasks.metrics import METRICS
from export.tasks.models import open_tuned
from export.tasks.predictions import read_predictions
from export.tasks.task import HOLDOUT, Task
from export.tasks.tokens import Encoded

#: Precisions of every tier.
PRECISIONS = ("fp32", "int8")
#: Tokens of the length that all tasks share, or the most that the model can read.
FIXED_TOKENS = 128
_FIXED_CALLS = 100
_ANSWERS, _MEASURED = "answers.npz", "measured.json"


class Measured(msgspec.Struct, frozen=True):
    """One file of one tier.

    Attributes:
        tier: ``dense``, or a name in :data:`export.experiments.family.TIERS`.
        precision: in :data:`PRECISIONS`.
        metric: the task's headline metric on dev.
        speedup: the dense FP32 model's time over its time, in neighbouring calls for one item: the median over dev.
        fixed_speedup: the same for :data:`FIXED_TOKENS` tokens.
        median_ms: of an item of dev.
    """

    tier: str
    precision: str
    metric: float
    speedup: float
    fixed_speedup: float
    median_ms: float
    file_bytes: int


class MeasuredFamily(msgspec.Struct, frozen=True):
    """All files of one family.

    Attributes:
        dense: the run of the dense model, the better one on the hold-out.
        files: dense FP32 first.
        processor: of the measurement; earlier versions did not record it.
    """

    task: str
    seed: int
    dense: str
    items: int
    mean_tokens: float
    files: tuple[Measured, ...]
    processor: Processor | None = None

    def file(self, tier: str, precision: str) -> Measured:
        """Return the measurements of one file."""
        return next(file for file in self.files if (file.tier, file.precision) == (tier, precision))


def measure_family(
    task: Task,
    directory: Path,
    dev: Encoded,
    *,
    seed: int,
    on_item: Callable[[int, int], None] = lambda done, items: None,
) -> MeasuredFamily:
    """Measure a trained family, and store its predictions, too, for paired comparisons.

    Raises:
        PlanError: a tier is faster than the removed multiplications can explain, against the dense model in the same
            precision: the machine was too busy.
    """
    dense = better_dense(task, directory)
    runs = {DENSE: directory / dense} | {tier: directory / tier for tier in TIERS}
    files: dict[tuple[str, str], bytes] = {}
    configs = {}
    for tier, run in runs.items():
        model = open_tuned(run, task.name)
        assert isinstance(model, SequenceClassifier)
        configs[tier] = model.transformer.config
        plain = _to_onnx(model, dev)
        files |= {(tier, "fp32"): fused(plain), (tier, "int8"): dynamic_int8(plain)}
    runners = {key: OnnxRuntimeRunner(data, subject=" ".join(key)) for key, data in files.items()}
    answers, seconds = _run(runners, dev, on_item)
    fixed_tokens = min(FIXED_TOKENS, configs[DENSE].max_positions)
    feeds = feeds_of(configs[DENSE], fixed_tokens)
    feeds["segments"] = np.zeros_like(feeds["inputs"])
    fixed = times_in_turns(runners, feeds, _FIXED_CALLS)
    measured = []
    for key, data in files.items():
        tier, precision = key
        metric = float(METRICS[task.headline](answers[key], dev.targets))
        ratio = float(np.median(seconds[DENSE, "fp32"] / seconds[key]))
        at_fixed = float(np.median(fixed[DENSE, "fp32"] / fixed[key]))
        median_ms = float(1e3 * np.median(seconds[key]))
        measured.append(Measured(tier, precision, metric, ratio, at_fixed, median_ms, len(data)))
    for runner in runners.values():
        runner.close()
    mean_tokens = float(dev.lengths.mean())
    for file in measured:
        dense_file = next(other for other in measured if (other.tier, other.precision) == (DENSE, file.precision))
        plan = Plan.between(configs[DENSE], configs[file.tier])
        check_speedup(plan, round(mean_tokens), file.speedup / dense_file.speedup)
        check_speedup(plan, fixed_tokens, file.fixed_speedup / dense_file.fixed_speedup)
    found = MeasuredFamily(task.name, seed, dense, len(dev.tokens), mean_tokens, tuple(measured), processor())
    _store(directory, found, {"/".join(key): values for key, values in answers.items()}, dev.targets)
    return found


def read_measured(directory: Path) -> MeasuredFamily | None:
    """Return the measurements of a family; None if there are none."""
    path = directory / _MEASURED
    try:
        return msgspec.json.decode(path.read_bytes(), type=MeasuredFamily) if path.exists() else None
    except (OSError, msgspec.DecodeError) as error:
        fix = "Delete it to measure the family again."
        expected = "measurements of a family"
        raise CheckpointError(f"{path}", given=Literally(error), expected=expected, fix=fix) from None


def better_dense(task: Task, directory: Path) -> str:
    """Return the better dense run on the hold-out, the teacher or the distilled model, which wins a tie."""
    scores = {name: read_predictions(directory / name, HOLDOUT).score(task.headline) for name in (DENSE, TEACHER)}
    return max(scores, key=lambda name: scores[name])


def read_answers(directory: Path) -> tuple[dict[tuple[str, str], Array], Array]:
    """Return the predictions of each tier and precision for dev, [n], and dev's targets, [n]."""
    path = directory / _ANSWERS
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = dict(arrays)
    except (OSError, ValueError) as error:
        fix = "Measure the family again: delete its measured.json, and give the same command."
        raise CheckpointError(f"{path}", given=Literally(error), expected="answers of a family", fix=fix) from None
    targets = found.pop("targets")
    answers = {}
    for key, values in found.items():
        tier, precision = key.split("/")
        answers[tier, precision] = values
    return answers, targets


def _to_onnx(model: SequenceClassifier, dev: Encoded) -> bytes:
    inputs = dev.batch(np.arange(2)).named
    dynamic = {name: {0: "batch", 1: "length"} for name in inputs}
    return to_onnx(model, inputs, ["logits"], dynamic)


def _run(
    runners: Mapping[tuple[str, str], OnnxRuntimeRunner], dev: Encoded, on_item: Callable[[int, int], None]
) -> tuple[dict[tuple[str, str], Array], dict[tuple[str, str], Array]]:
    items, keys = len(dev.tokens), list(runners)
    answers = {key: np.zeros(items, dtype=np.float64) for key in runners}
    seconds = {key: np.zeros(items) for key in runners}
    for item in range(-WARM_UP, items):
        batch = dev.batch(np.array([item % items]))
        feeds = {name: tensor.numpy() for name, tensor in batch.named.items()}
        for key in turns(keys, item):
            started = time.perf_counter()
            logits = runners[key].infer(feeds)["logits"][0]
            seconds[key][item] = time.perf_counter() - started
            answers[key][item] = logits[0] if len(logits) == 1 else logits.argmax()
        on_item(max(0, item + 1), items)
    return answers, seconds


def _store(directory: Path, found: MeasuredFamily, answers: Mapping[str, Array], targets: Array) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **answers, targets=targets)  # type: ignore[arg-type]
    write_whole(directory / _ANSWERS, buffer.getvalue())
    # Last, because it marks the family as measured.
    write_whole(directory / _MEASURED, msgspec.json.format(msgspec.json.encode(found), indent=1))
