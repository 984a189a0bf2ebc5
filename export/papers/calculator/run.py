"""The experiment of papers 000 and 001: errors and scores of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from edge.bundles.expression import evaluate, tokenize
from export.data.expressions import load
from export.papers.calculator.benchmark import EVALUATED, baseline, errors_of, measured, paper_long, paper_score
from export.papers.calculator.figures import figures_of
from export.papers.calculator.networks import NETWORKS
from export.papers.calculator.records import Grids, TrainingRecord, grouped, results_of
from export.papers.calculator.specs import NAMES
from export.papers.calculator.stack import NAMES as STACK_NAMES
from export.papers.calculator.tables import stack_tables, sums_tables
from export.papers.experiment import Experiment, Part, digest
from export.report.table import Table
from export.training.checkpoint import load as load_run
from export.training.runs import CONFIG, METRICS, WEIGHTS, RunMetrics, decode, read_config
from export.training.watch import Watch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Of the grids: both operands, from -10 to 10.
_OPERANDS = range(-10, 11)
FORMS = ("a + b", "a - b", *(f"a {first} b {second} 2" for first in "+-" for second in "+-"))


class BenchmarkSettings(msgspec.Struct, frozen=True):
    """What records depend on beside the runs: the benchmark's data and baseline."""

    benchmark: str


class CalculatorComparison(Experiment[TrainingRecord]):
    """The comparison of runs, each of which is a part; its name has a hash of configuration and weights."""

    title = "Calculators"
    record = TrainingRecord

    def __init__(self, runs: Sequence[Path], benchmark: str) -> None:
        self.settings = BenchmarkSettings(benchmark)
        self._parts = {f"{run.resolve().name}-{digest(run, CONFIG, WEIGHTS)[:8]}": run for run in runs}

    def parts(self) -> list[Part]:
        """Return a part for each run."""
        return [Part(name, (run,)) for name, run in self._parts.items()]

    def compute(self, part: Part, watch: Watch) -> TrainingRecord:
        """Return the measures of a run: of calculators of sums anew, of others those of their training."""
        (run,) = part.arguments
        config, metrics = read_config(run), decode(run / METRICS, RunMetrics)
        record = TrainingRecord(
            model=config.model,
            trainer=config.provenance.trainer,
            seed=config.provenance.seed,
            parameters=metrics.parameters,
            measures=metrics.measures,
        )
        return record if config.model in STACK_NAMES else _with_answers(run, record)

    def tables(self, records: Mapping[str, TrainingRecord]) -> list[Table]:
        """Return the tables of calculators of sums, and that of calculators for longer expressions."""
        sums, stack = _by_kind(records)
        return [*(sums_tables(results_of(grouped(sums))) if sums else []), *stack_tables(stack)]

    def figures(self, records: Mapping[str, TrainingRecord]) -> dict[str, Figure]:
        """Return errors by terms and operands."""
        groups = grouped(_by_kind(records)[0])
        return figures_of(groups) if groups else {}


def _by_kind(records: Mapping[str, TrainingRecord]) -> tuple[dict[str, TrainingRecord], dict[str, TrainingRecord]]:
    """Return the records of calculators of sums, in the order of their specs, and the others."""
    of_sums = {name: record for name, record in records.items() if record.model in NAMES}
    ordered = sorted(of_sums.items(), key=lambda one: (NAMES.index(one[1].model), one[1].seed or 0))
    return dict(ordered), {name: record for name, record in records.items() if name not in of_sums}


def _with_answers(run: Path, record: TrainingRecord) -> TrainingRecord:
    model, _, _ = load_run(run, NETWORKS)
    splits = load()
    values = {name: model.predict(splits[name].tokens)[:, 0] for name in EVALUATED}
    grids: Grids = {}
    for form in FORMS:
        texts = [form.replace("a", str(a)).replace("b", str(b)) for a in _OPERANDS for b in _OPERANDS]
        errors = model.predict(tokenize(texts))[:, 0].astype(np.float64) - [evaluate(text) for text in texts]
        grids[form] = errors.reshape(len(_OPERANDS), -1).round(5).tolist()
    return msgspec.structs.replace(
        record,
        measures=measured(values, splits),
        paper_scores=tuple(paper_score(errors_of(values, splits), seed) for seed in baseline().seeds.values()),
        paper_long=paper_long(values, splits),
        grids=grids,
    )
