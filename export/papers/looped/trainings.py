"""The trainings behind the results: rates are chosen on prompts of their own, alike for both kinds of models.

``python -m export.papers.looped.trainings --out DIR --only linear`` computes what has no record yet, the choice of the
rates first. ``trainings.json`` lists all; ``fewheads looped DIR/runs/*`` compares the runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import msgspec
from msgspec.structs import replace

from export.errors import TrainingError
from export.papers.experiment import Experiment, Part, compute_parts, read_records, report_experiment
from export.papers.looped.measure import pair_errors
from export.papers.looped.options import LoopedOptions
from export.papers.looped.prompts import FUNCTION_CLASSES, TUNING, draw_prompts, generator_of
from export.papers.looped.recipes import training_plan
from export.papers.looped.run import open_runs
from export.papers.looped.train import train_run
from export.report.table import Table
from export.training.recipe import Precision
from export.training.runs import is_run
from export.training.watch import Watch

#: Directories of runs, those that choose the rates in the second.
RUNS, _TUNED = "runs", "tuning"
_TUNING = "tuning-"
#: Options that names of runs do not spell out.
_IN_KIND = ("unlooped", "injection")


class Tuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The choice of rates for a looped and an unlooped model, on prompts that no other choice sees.

    Each of ``rates`` is tried with the first of ``seeds``, and the best ``finalists`` of each model with all others,
    because one seed cannot tell apart rates whose errors are close. Function classes beside ``functions`` take the
    rates of the first of them, and other models those of these two.
    """

    functions: tuple[str, ...]
    models: tuple[LoopedOptions, LoopedOptions]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    finalists: int
    prompts: int

    def trainings(self, records: Mapping[str, TrainingRecord]) -> list[tuple[str, LoopedOptions, int]]:
        """Return its trainings; those of the finalists as soon as the records tell them."""
        first, *others = self.seeds
        each = [(function, model) for function in self.functions for model in self.models]
        found = [(function, replace(model, rate=rate), first) for function, model in each for rate in self.rates]
        for function, model in each:
            for rate in self._best(records, function, model):
                found += [(function, replace(model, rate=rate), seed) for seed in others]
        return found

    def chosen(self, records: Mapping[str, TrainingRecord], function: str, *, unlooped: bool) -> float | None:
        """Return the finalist with the least mean error; None before all have one, or if all diverge."""
        function, model = function if function in self.functions else self.functions[0], self.models[unlooped]
        found = {rate: self.errors(records, function, model, rate) for rate in self._best(records, function, model)}
        if not found or any(len(errors) < len(self.seeds) for errors in found.values()):
            return None
        best = min(found, key=lambda rate: sum(found[rate]))
        return best if math.isfinite(sum(found[best])) else None

    def errors(
        self, records: Mapping[str, TrainingRecord], function: str, model: LoopedOptions, rate: float
    ) -> list[float]:
        """Return the errors of a rate with the seeds that are done, infinite where it diverged."""
        names = [name_of_tuning(function, replace(model, rate=rate), seed) for seed in self.seeds]
        found = [records[name].error for name in names if name in records]
        return [math.inf if error is None else error for error in found]

    def _best(self, records: Mapping[str, TrainingRecord], function: str, model: LoopedOptions) -> list[float]:
        """Return the finalists by their error with the first seed; none before all rates have one or diverged."""
        names = {rate: name_of_tuning(function, replace(model, rate=rate), self.seeds[0]) for rate in self.rates}
        if not {*names.values()} <= records.keys():
            return []
        first = {rate: error for rate, name in names.items() if (error := records[name].error) is not None}
        return sorted(first, key=first.__getitem__)[: self.finalists]


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trainings of each of some models on each of some function classes, with seeds from 0 on."""

    functions: tuple[str, ...]
    seeds: int
    models: tuple[LoopedOptions, ...]


class TrainingsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See :data:`SETTINGS`; ``precision`` is that of the multiplications in all trainings."""

    tuning: Tuning
    groups: dict[str, Group]
    precision: Precision


SETTINGS = msgspec.json.decode(Path(__file__).with_name("trainings.json").read_bytes(), type=TrainingsSettings)


class TrainingRecord(msgspec.Struct, frozen=True):
    """The rate of a training, and the error on the prompts of the tuning after all pairs; None if it diverged."""

    rate: float
    error: float | None


class Trainings(Experiment[TrainingRecord]):
    """The choice of the rates, and with names of ``groups`` also their trainings; ``out`` gets the runs."""

    title, extensible, record = "Trainings of looped and unlooped transformers", ("groups.",), TrainingRecord

    def __init__(self, settings: TrainingsSettings, out: Path, groups: Sequence[str] = ()) -> None:
        self.settings: TrainingsSettings = settings
        self._out, self._groups = out, groups

    def parts(self) -> list[Part]:
        """Return the trainings that choose the rates, then those of the groups, seed by seed."""
        tunings = self.settings.tuning.trainings(read_records(self._out, TrainingRecord))
        found = [Part(name_of_tuning(*one), one) for one in tunings]
        for group in (self.settings.groups[name] for name in self._groups):
            for seed in range(group.seeds):
                for function in group.functions:
                    found += [Part(name_of(function, one, seed), (function, one, seed)) for one in group.models]
        return found

    def compute(self, part: Part, watch: Watch) -> TrainingRecord:
        """Train and measure a model; an unfinished training resumes."""
        function, options, seed = part.arguments
        tunes = part.name.startswith(_TUNING)
        if not tunes:
            records = read_records(self._out, TrainingRecord)
            rate = self.settings.tuning.chosen(records, function, unlooped=options.unlooped)
            assert rate is not None, "the rates are chosen first, and one of them does not diverge"
            options = replace(options, rate=rate)
        run = self._out / (_TUNED if tunes else RUNS) / part.name
        try:
            if not is_run(run):
                plan = training_plan(function, replace(options, precision=self.settings.precision))
                train_run(function, plan, run, seed=seed, observer=watch)
        except TrainingError:
            return TrainingRecord(options.rate, None)
        (trained,) = open_runs([run])
        shape = trained.model.config.points, trained.model.config.dims
        prompts = draw_prompts(function, self.settings.tuning.prompts, *shape, generator_of(TUNING))
        errors = pair_errors(trained.model, prompts, trained.loops)[:, -1]
        return TrainingRecord(options.rate, float(errors.mean() / FUNCTION_CLASSES[function].normaliser(shape[1])))

    def tables(self, records: Mapping[str, TrainingRecord]) -> list[Table]:
        """Return the table of the tuning, and that of the trainings."""
        rows = [
            (name, of.rate, "diverged" if of.error is None else of.error)
            for name, of in records.items()
            if not name.startswith(_TUNING)
        ]
        tables = [rates_table(self.settings.tuning, records)]
        tables += [Table("Trainings", ("run", "rate", "error on the prompts of the tuning"), rows)] if rows else []
        return tables


def name_of_tuning(function: str, options: LoopedOptions, seed: int) -> str:
    """Return the name of a training that chooses a rate."""
    return f"{_TUNING}{name_of(function, options, seed)}"


def name_of(function: str, options: LoopedOptions, seed: int) -> str:
    """Return the name of a run: function class, kind, what differs from the usual model, and seed."""
    usual, given = msgspec.structs.asdict(LoopedOptions()), msgspec.structs.asdict(options)
    others = [f"{name}{value}" for name, value in given.items() if value != usual[name] and name not in _IN_KIND]
    kind = "unlooped" if options.unlooped else "looped"
    return "-".join([function, kind, *([options.injection] if options.injection else []), *others, str(seed)])


def rates_table(tuning: Tuning, records: Mapping[str, TrainingRecord]) -> Table:
    """Return the errors of all rates, seed by seed, and the chosen ones."""
    rows = []
    for function in tuning.functions:
        for model in tuning.models:
            errors = [tuning.errors(records, function, model, rate) for rate in tuning.rates]
            cells = [", ".join("diverged" if math.isinf(one) else f"{one:.4f}" for one in of) for of in errors]
            chosen = tuning.chosen(records, function, unlooped=model.unlooped)
            rows.append((function, "unlooped" if model.unlooped else "looped", *cells, chosen))
    heads = ("function", "model", *(f"rate {rate:g}" for rate in tuning.rates), "chosen")
    return Table("Errors by learning rate (in units of the usual one), seed by seed", heads, rows, 2)


@click.command()
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Gets runs and records.")
@click.option("--only", "groups", multiple=True, type=click.Choice(list(SETTINGS.groups)), help="Repeatable; else all.")
@click.option("--jobs", type=click.IntRange(1), help="Trainings at a time, with a thread each; a core each by default.")
def main(out: Path, groups: tuple[str, ...], jobs: int | None) -> None:
    """Choose the rates, then train the models of the groups; the same command resumes."""
    # All rates, then the finalists among them, then the groups with the chosen ones.
    for chosen in ((), (), groups or tuple(SETTINGS.groups)):
        experiment = Trainings(SETTINGS, out, chosen)
        compute_parts(experiment, out, as_jobs=True, jobs=jobs)
    report_experiment(Trainings(SETTINGS, out, tuple(SETTINGS.groups)), out, plots=False)


if __name__ == "__main__":
    main()
