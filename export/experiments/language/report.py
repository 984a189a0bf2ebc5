"""The report: one table, the verdict, and what the head changes, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from export.papers.backward.compare.changes import RANKS, Changes, Flips
from export.papers.backward.compare.methods import DIMS
from export.papers.backward.compare.summary import Outcome, Results, Row
from export.papers.experiment import markdown_table
from export.training.intervals import RESAMPLES, Difference

_HEADS = (
    "task",
    "method",
    "seeds",
    "trained parameters",
    "learning rate",
    "cross-entropy",
    "perplexity",
    "exact match",
    "the head's cross-entropy minus this",
    "its exact match minus this",
    "RMSE",
    "unparsable",
)


def report_of(results: Results, changes: Sequence[Changes], figures: Sequence[str]) -> str:
    """Return the report.

    Args:
        figures: file names beside the report.
    """
    settings = results.settings
    rates = ", ".join(f"{rate:g}" for rate in settings.rates)
    lines = [
        "# Backward attention on a frozen language model",
        "",
        results.verdict,
        "",
        f"Written by `fewheads language compare`, on {results.base.name} with SHA-256 {results.base.sha256[:12]}…. "
        f"Each method had the same {settings.limit:,} training examples of a task at most, {settings.epochs} times; "
        f"the head has d = {DIMS}, the adapter and LoRA about as many parameters. The learning rate is one of "
        f"{rates}, by the cross-entropy on a hold-out of the training splits, chosen with the first seed. Each was "
        "then scored once on the test split: the cross-entropy (nats per token) on all examples, answers on the first "
        f"{settings.items}. Intervals are of 95 %, each by itself: they add the errors of the examples "
        f"({RESAMPLES:,} resamples) and of the seeds (Student's); differences are of the same examples. The head wins "
        "where more than half of the tasks say so on balance. The literal form's loss takes a distribution for logits, "
        "so that its cross-entropy is at least ln((e + V - 1) / e).",
        "",
        f"Computed on {results.processor.name} ({results.processor.described}).",
    ]
    if results.missing:
        lines += ["", f"{results.missing} parts are still to be computed."]
    against = [(one.control, *map(str, _counts_of(one)), one.described) for one in results.outcomes]
    lines += [
        "",
        *markdown_table(_AGAINST, against, texts=2),
        "",
        *markdown_table(_HEADS, [_row(row) for row in results.rows], texts=2),
    ]
    if changes:
        lines += [
            "",
            "## What the head changes",
            "",
            *markdown_table(_CHANGES, [_changed(one) for one in changes], texts=2),
        ]
    for name in figures:
        lines += ["", f"![{name.removesuffix('.png')}]({name})"]
    return "\n".join(lines) + "\n"


_AGAINST = (
    "the head against",
    "tasks",
    "cross-entropy lower",
    "higher",
    "exact match higher",
    "lower",
    "outcome",
)
_CHANGES = (
    "task",
    "right tokens that rise in rank",
    "that fall",
    *(f"rank {most} or better, before → after" for most in RANKS[:3]),
    "tokens wrong → right",
    "right → wrong",
    "answers wrong → right",
    "right → wrong",
)


def _row(row: Row) -> tuple[str, ...]:
    loss = row.cross_entropy
    perplexity = "" if loss is None else _bounds(*(math.exp(one) for one in (loss.value, *loss.interval)))
    return (
        row.task,
        row.method,
        str(row.seeds),
        f"{row.parameters:,}",
        "" if row.rate is None else f"{row.rate:g}",
        "" if loss is None else _bounds(loss.value, *loss.interval),
        perplexity,
        _bounds(row.exact_match.value, *row.exact_match.interval),
        *map(_difference, (row.head_cross_entropy, row.head_exact_match)),
        *(f"{row.others[name]:.3g}" if name in row.others else "" for name in ("rmse", "unparsable")),
    )


def _counts_of(one: Outcome) -> tuple[int, ...]:
    matches = one.higher_exact_match, one.lower_exact_match
    return one.tasks, one.lower_cross_entropy, one.higher_cross_entropy, *matches


def _changed(one: Changes) -> tuple[str, ...]:
    ranks = [f"{before:.3f} → {after:.3f}" for before, after in zip(one.frozen_ranks, one.head_ranks, strict=True)]
    return (one.task, str(one.rises), str(one.falls), *ranks[:3], *_flips(one.tokens), *_flips(one.answers))


def _flips(flips: Flips) -> tuple[str, str]:
    return f"{flips.wrong_to_right} of {flips.of}", str(flips.right_to_wrong)


def _difference(found: Difference | None) -> str:
    return "" if found is None else _bounds(found.value, *found.interval, sign="+")


def _bounds(value: float, low: float, high: float, *, sign: str = "") -> str:
    return f"{value:{sign}.4g} ({low:{sign}.3g} … {high:{sign}.3g})"
