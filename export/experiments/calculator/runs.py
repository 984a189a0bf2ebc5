"""Runs of calculators, and their answers to all expressions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from edge.cli.output import progress
from edge.datatypes import Array
from edge.files import write_whole
from export.papers.calculator.benchmark import EVALUATED
from export.papers.calculator.data import Split
from export.papers.calculator.networks import NETWORKS
from export.papers.calculator.run_arguments import not_a_seed
from export.papers.calculator.specs import SPECS
from export.papers.experiment import digest, read_part
from export.training.checkpoint import load
from export.training.runs import CONFIG, WEIGHTS, RunConfig


class Run(msgspec.Struct, frozen=True):
    """A run, and its predicted values [n] by split."""

    path: Path
    config: RunConfig
    parameters: int
    values: dict[str, Array]

    @property
    def seed(self) -> int | None:
        """The seed of its training; None for a network that is constructed."""
        return self.config.provenance.seed

    @property
    def group(self) -> tuple[str, tuple[tuple[str, str], ...], str]:
        """What runs share that differ in their seed alone: model, arguments and training."""
        arguments = tuple((name, str(value)) for name, value in sorted(self.config.arguments.items()))
        return self.config.model, arguments, self.config.provenance.trainer


def open_runs(paths: Sequence[Path], splits: Mapping[str, Split], cache: Path | None = None) -> list[Run]:
    """Load runs and compute their answers, with a progress bar.

    Args:
        cache: directory that keeps the answers by the hash of configuration and weights; the largest network takes a
            minute for them.
    """
    runs = []
    with progress() as bar:
        task = bar.add_task("answering", total=len(paths), note="")
        for path in paths:
            bar.update(task, note=path.name)
            model, config, metrics = load(path, NETWORKS)
            kept = cache / f"{digest(path, CONFIG, WEIGHTS)}.json" if cache else None
            if kept and kept.exists():
                answers = read_part(kept, dict[str, list[float]])
            else:
                answers = {name: model.predict(splits[name].tokens)[:, 0].tolist() for name in EVALUATED}
                if kept:
                    write_whole(kept, msgspec.json.encode(answers))
            values = {name: np.array(one, np.float32) for name, one in answers.items()}
            runs.append(Run(path, config, metrics.parameters, values))
            bar.advance(task)
    return runs


def grouped(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Return runs by the name of their model, ordered by seed; constructed ones, which are all alike, once.

    Names are those of the models without ``calculator-``, with the arguments that a run has beside those of its spec.

    Raises:
        UsageError: two runs of one model have the same seed.
    """
    groups: dict[tuple[object, ...], dict[int | None, Run]] = {}
    for run in runs:
        seeds = groups.setdefault(run.group, {})
        if run.seed in seeds and run.seed is not None:
            raise not_a_seed(run.path, f"seed {run.seed}, as in {seeds[run.seed].path}")
        seeds.setdefault(run.seed, run)
    named: dict[str, list[Run]] = {}
    for seeds in groups.values():
        found = sorted(seeds.values(), key=lambda run: run.seed or 0)
        named[_free(_name(found[0]), named)] = found
    order = list(SPECS)
    return dict(sorted(named.items(), key=lambda item: order.index(item[1][0].config.model)))


def _name(run: Run) -> str:
    arguments = (value if isinstance(value, str) else f"{name} {value}" for name, value in run.config.arguments.items())
    return ", ".join([run.config.model.removeprefix("calculator-"), *arguments])


def _free(name: str, taken: Mapping[str, object]) -> str:
    """Return a name; a second training of the same model becomes ``NAME, training 2``."""
    number = 2
    free = name
    while free in taken:
        free, number = f"{name}, training {number}", number + 1
    return free
