"""The comparison of mechanisms in the frame of experiments: training, use of heads, speed, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from msgspec.structs import replace
from torch import nn

from edge.datatypes import Array
from edge.errors import Raw, UsageError
from edge.files import sha256
from export.data.tokens import Encoded
from export.finetune.models import open_model
from export.finetune.objectives import TaskObjective
from export.finetune.predictions import METRICS
from export.finetune.recipe import FinetuningRecipe
from export.finetune.run import predict_splits, prepare, save_run, task_of
from export.models.heads import SequenceClassifier
from export.papers.adaptive.measures import HeadUse, Speed, head_use, speed, speed_on
from export.papers.adaptive.mechanisms import MECHANISMS, SharedInputs
from export.papers.adaptive.runs import name_of
from export.papers.adaptive.term import AdaptiveObjective, adaptive_term
from export.papers.experiment import Experiment, Part, unfinished
from export.reduce.calibration import calibration_batches, check_original
from export.reduce.target import CALIBRATION_EXAMPLES
from export.report.table import Table
from export.training.device import DeviceName, device_of
from export.training.intervals import Difference, Sample, average
from export.training.provenance import provenance
from export.training.runs import WEIGHTS
from export.training.trainer import Trained, train
from export.training.watch import Watch

FULL, SKIP = "full", "skip"
#: Paper 002's order at an equal share of attention: random, learnt for all inputs alike, and by input.
ORDER = ("random", "global", "budget")
#: Below ``--out``, of the runs that are kept.
RUNS = "runs"
#: Models with scores stop if the hold-out falls by more below the dense run.
_STOP_BELOW = 0.005
_LONG_TOKENS = 128


class MechanismSettings(msgspec.Struct, frozen=True):
    """Settings that all mechanisms of a comparison share; ``run`` is the SHA-256 of the dense run's weights."""

    run: str
    recipe: FinetuningRecipe
    limit: int | None
    seeds: int


class MechanismRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one mechanism and seed.

    Attributes:
        smaller: whether the timed matrices are smaller; otherwise scorers, masks and gates are timed, too.
        speeds: for inputs of random tokens, except of layers that are skipped by input, and last for rows of dev.
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
        keep_runs: whether each model is also kept as a run in ``out`` when its training ends.

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
        keep_runs: bool = False,
    ) -> None:
        self._names, self._out, self._device, self._keep_runs = names, out, device, keep_runs
        opened = open_model(run)
        task, model, architecture = task_of(opened, run), opened.head, opened.architecture
        assert architecture is not None
        if not isinstance(model, SequenceClassifier) or model.transformer.config.architecture != "bert":
            given = Raw(f"a run on {task.name} with a {architecture.transformer.architecture}")
            expected, fix = "a BERT with one answer for a text", "Give a run on a task of GLUE."
            raise UsageError(f"{run}", given=given, expected=expected, fix=fix)
        self.settings: MechanismSettings = MechanismSettings(sha256((run / WEIGHTS).read_bytes()), recipe, limit, seeds)
        data = prepare(task, data_dir, task.reader(run), max_length=architecture.max_length, limit=limit)
        self._dense, self._task, self._data, self._run, self._data_dir = model, task, data, run, data_dir
        self._architecture = architecture
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
        if self._keep_runs:
            self._keep(part, model, tuned, predicted)
        small = mechanism.shrink(model) if mechanism.shrink else model
        lengths = self._lengths if name != SKIP else ()  # what is skipped for random tokens says nothing
        speeds = tuple(speed(self._dense, small, tokens) for tokens in lengths)
        speeds = (*speeds, speed_on(self._dense, small, self._dev))
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

    def _keep(self, part: Part, model: SequenceClassifier, tuned: Trained, predicted: Any) -> None:
        (name, seed), recipe, task = part.arguments, self.settings.recipe, self._task
        number = len(self._data.train.targets)
        what = f"mechanism {name} from {self._run.name}, {number} examples, {recipe}"
        save_run(
            task,
            self._out / RUNS / part.name,
            model,
            replace(self._architecture, transformer=model.transformer.config),
            task.reader(self._run),
            {**predict_splits(task, model, self._data, final=False), next(iter(self._data.dev)): predicted},
            record=provenance(trainer=what, data=task.origin, seed=seed),
            tuned=tuned,
            data_dir=self._data_dir,
            precision=recipe.precision,
            trained_on=number,
            name=name_of(name),
        )

    def tables(self, records: Mapping[str, MechanismRecord]) -> list[Table]:
        """Return the table of all mechanisms, and that of their order."""
        return [*tables_of(records), *order_of(records)]


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
    lengths = list(dict.fromkeys(one.tokens for record in records.values() for one in record.speeds))
    lengths.sort(key=lambda tokens: tokens or _LONG_TOKENS + 1)
    for name, runs in groups.items():
        first, uses = runs[0], [run.use for run in runs]
        speeds = [[one for run in runs for one in run.speeds if one.tokens == tokens] for tokens in lengths]
        ratios = [_speeds(of) if of else None for of in speeds]
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
    speeds_on = [f"speed (bound), {'dev' if tokens is None else f'{tokens} tokens'}" for tokens in lengths]
    heads = ("mechanism", "what", "seeds", "share left", "mean score", "dev", "points over full")
    return [Table("Mechanisms", (*heads, *speeds_on, "timed"), rows, texts=2)] if rows else []


def order_of(records: Mapping[str, MechanismRecord]) -> list[Table]:
    """Return the table that decides whether each of :data:`ORDER` is better than the one before, if there are any.

    It is over the seeds that both have. One seed decides nothing.
    """
    rows, groups = [], _by_name(records)
    for lower, higher in pairwise(ORDER):
        both = groups.get(higher, []), groups.get(lower, [])
        seeds = {run.seed for run in both[0]} & {run.seed for run in both[1]}
        if not seeds:
            continue
        runs, baselines = ([run for run in of if run.seed in seeds] for of in both)
        change = difference(runs, baselines)
        low, high = change.interval
        verdict = "undecided" if len(seeds) < 2 or low <= 0 <= high else "better" if low > 0 else "worse"
        left = " and ".join(f"{_mean([run.use.kept for run in of]):.2f}" for of in (runs, baselines))
        rows.append((f"{higher} over {lower}", len(seeds), left, change, verdict))
    return [Table("Order", ("comparison", "seeds", "share left", "points", "it is"), rows)] if rows else []


def _speeds(of: Sequence[Speed]) -> str:
    return f"{_mean([one.ratio for one in of]):.2f} ({_mean([one.bound for one in of]):.2f})"


def _points(metric: str, answers: Array, targets: Array) -> Array:
    function: Any = METRICS[metric]
    return np.asarray(100 * function(answers, targets))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
