"""The record of an evaluation, a line for each run, and its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from edge.errors import Raw
from export.data.evaluation import SICK
from export.errors import CheckpointError
from export.models.transformer import LayerShape
from export.report.embeddings import RECORDS, Group
from export.report.embeddings.published import COMPLETE
from export.report.speed import Speed
from export.report.table import Table
from export.training.intervals import Difference, Mean
from export.training.points import Planned

Side = Literal["original", "run"]


class Score(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A measure of a run on a set, in points, or as a cosine.

    Attributes:
        items: name of the set.
        n: pairs, questions or texts.
        value: with its 95 % interval over them.
        difference: to the original's, on the same items; None of the original itself.
        documents: among which questions are answered.
        queries, index: whose embeddings of questions and of documents are compared.
        published: of the original, where the set is complete.
    """

    group: Group
    items: str
    measure: str
    n: int
    value: Mean
    difference: Difference | None = None
    documents: int | None = None
    queries: Side = "run"
    index: Side = "run"
    published: float | None = None


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A run, and its scores; the first one of an evaluation is the original.

    Attributes:
        weights: SHA-256 of its file of weights.
        layers: shapes of its layers; ``planned`` has what it was planned for, and with what dense latency.
        speed: measured when it was reduced, and predicted.
        sets: SHA-256 of the texts of each set.
    """

    run: str
    weights: str
    parameters: int
    max_length: int
    layers: tuple[LayerShape, ...]
    planned: Planned | None
    speed: Speed
    sets: dict[str, str]
    scores: tuple[Score, ...]


def encode_records(records: Sequence[RunRecord]) -> bytes:
    """Return the records as JSON lines."""
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


def read_records(directory: Path) -> list[RunRecord]:
    """Return the records of an evaluation; raise a CheckpointError if they are missing or malformed."""
    path = directory / RECORDS
    try:
        return msgspec.json.Decoder(RunRecord).decode_lines(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        fix = "Give the --out of 'fewheads evaluate'."
        raise CheckpointError(f"{path}", given=Raw(error), expected="records of an evaluation", fix=fix) from None


#: Group to the title of its table, what its items are, and a note.
_GROUPS: Mapping[Group, tuple[str, str, str]] = {
    "sts": (
        "Similarity",
        "pairs",
        "Spearman's correlation of cosines with people's scores, times 100, all pairs of a year together. Published "
        "figures are MTEB's, and stand only beside complete sets.",
    ),
    "retrieval": ("Retrieval", "questions", "The document with the answer among all others, times 100."),
    "probes": ("Linear probes", "texts", "Logistic regression on embeddings, measured on held-out texts, times 100."),
    "mixed": ("Mixed tiers in one index", "questions", "Questions embedded by one run, and documents by another one."),
}
#: Of texts, between a run and the original.
COSINE = "cosine"


def tables(records: Sequence[RunRecord]) -> list[Table]:
    """Return the tables of an evaluation: runs, similarity, retrieval, probes, and mixed tiers."""
    return [_runs(records), *(table for group in _GROUPS if (table := _table(group, records)).rows)]


def _table(group: Group, records: Sequence[RunRecord]) -> Table:
    title, items, note = _GROUPS[group]
    scores = [(record.run, one) for record in records for one in record.scores if one.group == group]
    scores = [(run, one) for run, one in scores if one.measure != COSINE]
    order = list(dict.fromkeys((one.items, one.measure) for _, one in scores))
    scores.sort(key=lambda pair: order.index((pair[1].items, pair[1].measure)))  # stable: runs keep their order
    names = {"original": records[0].run}
    is_mixed = group == "mixed"
    columns: dict[str, list[object]] = {
        "set": [one.items for _, one in scores],
        "measure": [one.measure for _, one in scores],
        "questions by": [names.get(one.queries, run) if is_mixed else None for run, one in scores],
        "documents by": [names.get(one.index, run) if is_mixed else None for run, one in scores],
        "run": [None if is_mixed else run for run, _ in scores],
        items: [one.n for _, one in scores],
        "documents": [one.documents for _, one in scores],
        "score": [one.value for _, one in scores],
        f"difference to {records[0].run}": [one.difference for _, one in scores],
        "published": [one.published for _, one in scores],
    }
    columns = {head: cells for head, cells in columns.items() if any(cell is not None for cell in cells)}
    rows = list(zip(*columns.values(), strict=True))
    note += " In parentheses are 95 % intervals over the items; differences are paired."
    note += "".join(sorted({partial for _, one in scores if (partial := _partial(one))}))
    return Table(title, list(columns), rows, list(columns).index(items) if rows else 1, note)


def _partial(score: Score) -> str:
    """Return why a set is not the one of the published figures; empty for others."""
    if score.items == SICK:
        return f" {SICK} is one part of the set that others publish."
    pairs = COMPLETE.get(score.items, score.n)
    return (
        ""
        if score.n == pairs
        else f" {score.items} has {score.n} of its {pairs} pairs here, and compares with no other."
    )


def _runs(records: Sequence[RunRecord]) -> Table:
    speed = records[0].speed
    heads = ("run", "layers", "parameters", "predicted ms", "times faster", "cosine to the original", "weights")
    rows = [
        (
            record.run,
            len(record.layers),
            record.parameters,
            record.speed.predicted[0].milliseconds,
            record.speed.predicted[0].times_faster,
            next((one.value for one in record.scores if one.measure == COSINE), None),
            record.weights[:12],
        )
        for record in records
    ]
    where, size = f"{speed.device} at {speed.power_mode}", speed.predicted[0]
    note = f"Latency: {speed.label}, for {where}, {size.tokens} tokens, batch {size.rows}."
    return Table("Runs", heads, rows, 1, note)
