"""The experiment: families of runs are trained and answer dev, each a part; then their files are timed, one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from export.papers.experiment import Experiment, Part, read_records
from export.papers.frontier.figures import draw
from export.papers.frontier.records import ExperimentSettings, Family, Record, Sources, measured
from export.papers.frontier.summary import Summary
from export.papers.frontier.tables import tables_of, text_of
from export.report.table import Table
from export.training.watch import Watch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TIMES = "-times"


class Frontier(Experiment[Record]):
    """Speed against accuracy of dense models, of restored tiers, and of a control that was not restored.

    Args:
        sources: None only reports.
        out: the directory of the results.
        trainings: whether the times of files are left out; they need a machine without other work.
    """

    title = "Speed against accuracy"
    record = Record
    settings: ExperimentSettings

    def __init__(
        self,
        settings: ExperimentSettings,
        sources: Sources | None = None,
        out: Path = Path(),
        *,
        trainings: bool = False,
    ) -> None:
        self.settings, self._sources, self._out, self._trainings = settings, sources, out, trainings
        self._found: tuple[Mapping[str, Record], Summary | None] | None = None
        self.extensible = tuple(f"frontier.tasks.{task}.seeds" for task in settings.frontier.tasks)

    def parts(self) -> Sequence[Part]:
        """Return the parts of all families, seed by seed, and behind them those of their times."""
        families = [
            Family(self.settings, task, seed)
            for task, of_task in self.settings.frontier.tasks.items()
            for seed in range(of_task.seeds)
        ]
        names = [(one.name, one) for one in sorted(families, key=lambda family: family.seed)]
        times = [] if self._trainings else [Part(f"{name}{_TIMES}", (one,)) for name, one in names]
        return [*(Part(name, (one,)) for name, one in names), *times]

    def compute(self, part: Part, watch: Watch) -> Record:
        """Train a family and return its answers, or time its files."""
        from export.papers.frontier.family import answer, inputs_of, time_files, train

        assert self._sources, "it only reports"
        (family,) = part.arguments
        inputs, directory = inputs_of(family, self._sources), self._out / family.name
        if part.name.endswith(_TIMES):
            answered = read_records(self._out, Record)[family.name].answered
            assert answered
            return Record(timed=time_files(answered, inputs, directory, watch))
        train(family, inputs, directory, watch)
        return Record(answered=answer(family, inputs, directory, watch))

    def text(self, records: Mapping[str, Record]) -> str:
        """Return the conditions and the table of the first screen."""
        summary = self._summary(records)
        return text_of(summary) if summary else ""

    def tables(self, records: Mapping[str, Record]) -> Sequence[Table]:
        """Return all further tables."""
        summary = self._summary(records)
        return tables_of(summary) if summary else []

    def figures(self, records: Mapping[str, Record]) -> Mapping[str, Figure]:
        """Return the figure of speed against accuracy."""
        summary = self._summary(records)
        return {"frontier": draw(summary)} if summary else {}

    def _summary(self, records: Mapping[str, Record]) -> Summary | None:
        """Return the summary of the measured families, task by task, which takes seconds; None without any."""
        if self._found is None or self._found[0] is not records:
            families = []
            for task in self.settings.frontier.tasks:
                names = [name for name in records if name.startswith(f"{task}-seed") and name + _TIMES in records]
                for name in names:
                    answered, timed = records[name].answered, records[name + _TIMES].timed
                    assert answered
                    assert timed
                    families.append(measured(answered, timed))
            self._found = records, Summary(families, self.settings) if families else None
        return self._found[1]
