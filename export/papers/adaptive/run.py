"""The comparison of mechanisms in the frame of experiments: training, use of heads, speed, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from edge.datatypes import Array
from edge.errors import Raw, UsageError
from edge.files import sha256
from export.data.tokens import Encoded, Rows, sorted_batches
from export.finetune.models import open_model
from export.finetune.objectives import TaskObjective, outputs_of
from export.finetune.predictions import METRICS
from export.finetune.recipe import FinetuningRecipe
from export.finetune.run import prepare, task_of
from export.models.heads import SequenceClassifier
from export.papers.adaptive.mechanisms import MECHANISMS, SharedInputs
from export.papers.adaptive.scores import scored_attentions
from export.papers.adaptive.term import AdaptiveObjective, adaptive_term
from export.papers.experiment import Experiment, Part, unfinished
from export.reduce.calibration import calibration_batches, check_original
from export.reduce.latency import feeds_of, measure_models
from export.reduce.states import recorded
from export.reduce.target import CALIBRATION_EXAMPLES
from export.report.table import Table
from export.training.device import DeviceName, device_of
from export.training.intervals import Difference, Sample, average
from export.training.runs import WEIGHTS
from export.training.trainer import train
from export.training.watch import Watch

FULL = "full"
#: Models with scores stop if the hold-out falls by more below the dense run.
_STOP_BELOW = 0.005
_LONG_TOKENS, _BATCH = 128, 64


class MechanismSettings(msgspec.Struct, frozen=True):
    """Settings that all mechanisms of a comparison share; ``run`` is the SHA-256 of the dense run's weights."""

    run: str
    recipe: FinetuningRecipe
    limit: int | None
    seeds: int


class Speed(msgspec.Struct, frozen=True):
    """Dense time over a model's time, in turns, and the bound: the dense model's multiplications over its own."""

    tokens: int
    ratio: float
    bound: float


class HeadUse(msgspec.Struct, frozen=True):
    """Use of a model's heads on some rows.

    Attributes:
        kept: mean share of the coordinates in use.
        score: mean score; None for a model without scores.
        spread: share of a head's variance of scores that is between inputs; 0 if they are the same for all inputs.
    """

    kept: float
    score: float | None = None
    spread: float | None = None


class MechanismRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one mechanism and seed.

    Attributes:
        smaller: whether the timed matrices are smaller; otherwise scorers and masks are timed, too.
        holdout: the metric on the hold-out, of each epoch.
        answers, targets: classes or values of dev's items.
    """

    name: str
    what: str
    seed: int
    metric: str
    smaller: bool
    holdout: tuple[float, ...]
    use: HeadUse
    speeds: tuple[Speed, ...]
    answers: tuple[float, ...]
    targets: tuple[float, ...]


class Mechanisms(Experiment[MechanismRecord]):
    """The comparison of mechanisms, each with each seed.

    Args:
        names: of mechanisms.
        out: keeps the states of unfinished trainings, too.

    Raises:
        UsageError: the run has another architecture or task.
        ReductionError: the model cannot be reduced, or there are too few examples for calibration.
    """

    title, extensible, record = "Ways to save attention", ("seeds",), MechanismRecord

    def __init__(
        self,
        run: Path,
        data_dir: Path,
        out: Path,
        names: Sequence[str],
        recipe: FinetuningRecipe,
        *,
        limit: int | None,
        seeds: int,
        device: DeviceName,
    ) -> None:
        self._names, self._out, self._device = names, out, device
        opened = open_model(run)
        task, model, architecture = task_of(opened, run), opened.head, opened.architecture
        assert architecture is not None
        if not isinstance(model, SequenceClassifier) or model.transformer.config.architecture != "bert":
            given = Raw(f"a run on {task.name} with a {architecture.transformer.architecture}")
            expected, fix = "a BERT with one answer for a text", "Give a run on a task of GLUE."
            raise UsageError(f"{run}", given=given, expected=expected, fix=fix)
        self.settings: MechanismSettings = MechanismSettings(sha256((run / WEIGHTS).read_bytes()), recipe, limit, seeds)
        data = prepare(task, data_dir, task.reader(run), max_length=architecture.max_length, limit=limit)
        self._dense, self._task, self._data = model, task, data
        self._dev = next(iter(data.dev.values()))
        self._calibration = cast(Encoded, data.train).first(CALIBRATION_EXAMPLES)
        # The median of dev, because SST-2's hold-out is phrases like its training set.
        longest = min(_LONG_TOKENS, model.transformer.config.max_positions)
        self._lengths = int(np.median(self._dev.lengths)), longest
        if any(MECHANISMS[name].calibrated for name in names):
            check_original(model)
            calibration_batches(model, self._calibration)

    def parts(self) -> list[Part]:
        """Return a part for each mechanism and seed."""
        return [Part(f"{name}-seed{seed}", (name, seed)) for seed in range(self.settings.seeds) for name in self._names]

    def compute(self, part: Part, watch: Watch) -> MechanismRecord:
        """Make, train and time a mechanism; an unfinished training resumes."""
        name, seed = part.arguments
        mechanism, recipe, task, data = MECHANISMS[name], self.settings.recipe, self._task, self._data
        directory = unfinished(self._out, part)
        shared = SharedInputs(self._dense, self._calibration, seed, directory / "reduction")
        made = mechanism.make(shared)
        model, loss = made.model.to(device_of(self._device)), mechanism.train(shared)

        def score(of: nn.Module) -> float:
            return float(task.predict(of, data.holdout).score(task.headline))  # type: ignore[arg-type]

        floor = score(self._dense) - _STOP_BELOW if loss else None
        with adaptive_term(model, loss) if loss else nullcontext() as term:
            of = partial(AdaptiveObjective, term=term) if term else TaskObjective
            objective = of(model, data.train, recipe, seed=seed, evaluate=partial(score, model))
            tuned = train(objective, recipe, seed=seed, stop_below=floor, state=directory / "state", observer=watch)
        predicted: Any = task.predict(model, self._dev)
        model = model.cpu()
        use = head_use(model, self._dev) or HeadUse(made.kept)
        small = mechanism.shrink(model) if mechanism.shrink else model
        speeds = tuple(speed(self._dense, small, tokens) for tokens in self._lengths)
        return MechanismRecord(
            name=name,
            what=mechanism.what,
            seed=seed,
            metric=task.headline,
            smaller=mechanism.shrink is not None,
            holdout=tuned.scores,
            use=use,
            speeds=speeds,
            answers=tuple(predicted.answers.tolist()),
            targets=tuple(predicted.targets.tolist()),
        )

    def tables(self, records: Mapping[str, MechanismRecord]) -> list[Table]:
        """Return the table of all mechanisms."""
        return tables_of(records)


def _by_name(records: Mapping[str, MechanismRecord]) -> dict[str, list[MechanismRecord]]:
    groups: dict[str, list[MechanismRecord]] = {}
    for record in records.values():
        groups.setdefault(record.name, []).append(record)
    return groups


def sample_of(runs: Sequence[MechanismRecord]) -> Sample:
    """Return the metric on dev, times 100."""
    metric, answers = partial(_points, runs[0].metric), [np.array(run.answers) for run in runs]
    return Sample.of_answers(metric, answers, np.array(runs[0].targets))


def difference(runs: Sequence[MechanismRecord], baselines: Sequence[MechanismRecord]) -> Difference:
    """Return the difference on dev in points, over the seeds of both."""
    seeds = {run.seed for run in runs} & {run.seed for run in baselines}
    here, there = (sample_of([run for run in of if run.seed in seeds]) for of in (runs, baselines))
    return average([here.paired(there)])


def tables_of(records: Mapping[str, MechanismRecord]) -> list[Table]:
    """Return the table of mechanisms, if there are any; speeds have their bounds in brackets."""
    rows, groups = [], _by_name(records)
    for name, runs in groups.items():
        first, uses = runs[0], [run.use for run in runs]
        speeds = [[run.speeds[number] for run in runs] for number in range(len(first.speeds))]
        ratios = [f"{_mean([one.ratio for one in of]):.2f} ({_mean([one.bound for one in of]):.2f})" for of in speeds]
        scores = [use.score for use in uses if use.score is not None]
        change = difference(runs, groups[FULL]) if name != FULL and FULL in groups else None
        rows.append(
            (
                name,
                first.what,
                len(runs),
                f"{_mean([use.kept for use in uses]):.2f}",
                f"{_mean(scores):.2f}" if scores else None,
                sample_of(runs).mean(),
                change,
                *ratios,
                "smaller" if first.smaller else "as it runs",
            )
        )
    lengths = [f"speed (bound), {one.tokens} tokens" for record in list(records.values())[:1] for one in record.speeds]
    heads = ("mechanism", "what", "seeds", "attention left", "mean score", "dev", "points over full")
    return [Table("Mechanisms", (*heads, *lengths, "timed"), rows, texts=2)] if rows else []


def head_use(model: SequenceClassifier, rows: Rows) -> HeadUse | None:
    """Return the use of a model's heads on some rows; None for a model without scores."""
    attentions = scored_attentions(model.eval())
    if not attentions:
        return None
    scores, kept = [], []
    with torch.no_grad():
        for indices in sorted_batches(rows.lengths, _BATCH):
            with recorded(attention.scorer for attention in attentions) as states:
                outputs_of(model, rows.batch(indices))
            scores.append(torch.stack([states[attention.scorer].returned for attention in attentions]))
            kept += [one.keep(of).mean(dim=(1, 2)) for one, of in zip(attentions, scores[-1], strict=True)]
    every = torch.cat(scores, dim=1)  # [layers, n, H]
    within, whole = every.var(dim=1, correction=0).mean(), every.var(correction=0)
    return HeadUse(float(torch.cat(kept).mean()), float(every.mean()), float(within / whole) if whole > 0 else 0.0)


def speed(dense: SequenceClassifier, model: nn.Module, tokens: int) -> Speed:
    """Time a model on ONNX Runtime, CPU, one thread, in turns with the dense one, on an input of some tokens."""
    feeds = feeds_of(dense.transformer.config, tokens)
    measured = measure_models(dense, model, feeds)
    return Speed(tokens, measured.ratio, multiplications(dense, feeds) / multiplications(model, feeds))


def multiplications(model: nn.Module, feeds: Mapping[str, Array]) -> int:
    """Return the multiplications of a model for some inputs, with scorers and masked products."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(*map(torch.from_numpy, feeds.values()))
    return int(counter.get_total_flops()) // 2


def _points(metric: str, answers: Array, targets: Array) -> Array:
    function: Any = METRICS[metric]
    return np.asarray(100 * function(answers, targets))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
