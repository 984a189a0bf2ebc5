"""The records of the comparison of paper 004, one for each method, task and seed, and the tables of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from edge.bundles.manifest import Measure
from export.papers.backward.methods import CONTROLS, FROZEN, HEAD
from export.report.table import Table
from export.training.intervals import Sample, across_seeds


class MethodRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A method on a task with a seed.

    Attributes:
        parameters: that were trained.
        rate: the learning rate that was used; None without training.
        holdout: cross-entropy by learning rate, of those that were tried; None where the training diverged.
        shown: examples in the prompt.
        losses: sum of the cross-entropies of each test example's tokens, to a millionth, and ``tokens`` their number.
            There are none of another decoding, which leaves the tokens' probabilities as they are.
        measures: precision, recall and F1 of the most likely tokens.
        right: whether the answers to the first test examples are.
    """

    parameters: int = 0
    rate: float | None = None
    holdout: dict[str, float | None] = {}
    shown: int = 0
    losses: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    measures: tuple[Measure, ...] = ()
    right: tuple[bool, ...]


class Scored(NamedTuple):
    """What a record is of, but for its seed."""

    method: str
    task: str
    examples: int


#: The records of all seeds.
Groups = Mapping[Scored, Sequence[MethodRecord]]


def tables_of(groups: Groups, tasks: Sequence[str], limit: int) -> list[Table]:
    """Return the metrics of all methods by task, learning rates, the answers that the head changes, and fewer examples.

    Args:
        limit: the most examples.
    """
    whole = {key: group for key, group in groups.items() if key.examples == limit}
    tables = [*_metrics(whole, tasks), _rates(whole, tasks), _flips(whole, tasks), *_tokens(whole, tasks)]
    sizes = sorted({key.examples for key in groups})
    if len(sizes) > 1:
        by_size = [_metrics(_of_size(groups, examples), tasks) for examples in sizes]
        for table, *of_sizes in zip(tables[:2], *by_size, strict=True):
            rows = [(examples, *row) for examples, of in zip(sizes, of_sizes, strict=True) for row in of.rows]
            tables.append(Table(f"{table.title}, by examples", ("examples", *table.heads), rows, texts=2))
    return tables


def _of_size(groups: Groups, examples: int) -> Groups:
    """Return the records of a number of examples, and the frozen model's, which has none."""
    return {key: of for key, of in groups.items() if key.examples == examples or key.method == FROZEN.name}


def _metrics(groups: Groups, tasks: Sequence[str]) -> list[Table]:
    """Return cross-entropies and right answers, metric by metric: the resamples of one number of items are kept."""
    by_name = {(key.method, key.task): group for key, group in groups.items()}
    losses = {
        key: Sample.of_items(np.array([record.losses for record in group]), np.array(group[0].tokens, float))
        for key, group in by_name.items()
        if group[0].losses
    }
    first = {key: group[0] for key, group in by_name.items()}
    table = _by_task("Cross-entropy, nats per token", first, losses, tasks)
    matches = {
        key: Sample.of_items(100.0 * np.array([record.right for record in group]), np.ones(len(group[0].right)))
        for key, group in by_name.items()
    }
    return [table, _by_task("Right answers, %", first, matches, tasks)]


def _by_task(
    title: str,
    first: Mapping[tuple[str, str], MethodRecord],
    samples: Mapping[tuple[str, str], Sample],
    tasks: Sequence[str],
) -> Table:
    """Return the means of methods, and what the head has more or less than each control."""
    parameters = {method: first[method, task].parameters for method, task in samples}
    rows: list[tuple[object, ...]] = [
        (name, number, *(samples[name, task].mean() if (name, task) in samples else None for task in tasks))
        for name, number in parameters.items()
    ]
    controls = [name for name in parameters if name in CONTROLS] if HEAD.name in parameters else []
    for name in controls:
        pairs = [(samples.get((HEAD.name, task)), samples.get((name, task))) for task in tasks]
        rows.append((f"the head minus: {name}", None, *(a.minus(b) if a and b else None for a, b in pairs)))
    return Table(title, ("method", "trained parameters", *tasks), rows)


def _rates(groups: Groups, tasks: Sequence[str]) -> Table:
    rates: dict[str, dict[str, float]] = {}
    for key, group in groups.items():
        if group[0].rate is not None:
            rates.setdefault(key.method, {})[key.task] = group[0].rate
    return Table("Learning rates", ("method", *tasks), [(name, *map(of.get, tasks)) for name, of in rates.items()])


def _flips(groups: Groups, tasks: Sequence[str]) -> Table:
    by_name = {(key.method, key.task): group[0].right for key, group in groups.items()}
    pairs = {
        task: list(zip(by_name[FROZEN.name, task], by_name[HEAD.name, task], strict=True))
        for task in tasks
        if {(FROZEN.name, task), (HEAD.name, task)} <= by_name.keys()
    }
    flips = [(task, len(of), of.count((False, True)), of.count((True, False))) for task, of in pairs.items()]
    heads = ("task", "of", "wrong → right", "right → wrong")
    return Table("Answers that the first head changes", heads, flips)


def _tokens(groups: Groups, tasks: Sequence[str]) -> list[Table]:
    """Return F1, precision and recall of the most likely tokens, each a mean over the tokens that occur."""
    tables = []
    for metric, words in (("token_f1", "F1"), ("token_precision", "Precision"), ("token_recall", "Recall")):
        rows: dict[str, dict[str, object]] = {}
        for key, group in groups.items():
            runs = [[one for one in record.measures if one.metric == metric] for record in group]
            if all(runs):
                (measure,) = across_seeds(runs) if len(runs) > 1 else runs[0]
                rows.setdefault(key.method, {})[key.task] = measure
        title = f"{words} of the most likely tokens, mean over tokens"
        tables += [Table(title, ("method", *tasks), [(name, *map(of.get, tasks)) for name, of in rows.items()])]
    return tables
