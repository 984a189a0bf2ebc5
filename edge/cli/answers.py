"""Answers of a model: as tables, as JSON, and as text that is printed as it comes."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from edge.cli.output import print_json, print_table, remark
from edge.datatypes import Array
from edge.errors import ServerRefused, printable
from edge.protocol import BOX_PREFIXES, PROBABILITIES

if TYPE_CHECKING:
    from edge.client import Client, InferRequest, InferResult

_STAGES = ("compute_input_ns", "queue_ns", "compute_infer_ns", "compute_output_ns")
#: A longer value is shown by the first of its numbers and how many they are.
_MOST_VALUES, _SHOWN_VALUES = 8, 3
_MOST_COSINES = 20
_EMPTY = np.zeros(0)
#: The outputs of a model that answers questions.
ANSWER = ("answer", "score", "start", "end")


def print_answer(
    result: InferResult,
    columns: Mapping[str, Sequence[str]],
    labels: list[list[dict[str, Any]]] | None,
    *,
    as_json: bool,
) -> None:
    """Print an answer and the time of each stage.

    Args:
        columns: the texts that were sent, or the paths of images, by input.
        labels: label and probability of the likeliest classes of each row, to be shown in place of the outputs.
    """
    plain = {name: np.atleast_1d(_plain(array)).tolist() for name, array in result.outputs.items()}
    # Other servers send no stage times, so all of the time counts as transport.
    stages_ns = {stage: result.timings_ns[stage] for stage in _STAGES if stage in result.timings_ns}
    times_ms = {stage.removesuffix("_ns"): duration / 1e6 for stage, duration in stages_ns.items()}
    times_ms["transport"] = (result.round_trip_ns - sum(stages_ns.values())) / 1e6
    times_ms["round_trip"] = result.round_trip_ns / 1e6
    if as_json:
        facts = {"model": result.model, "version": result.model_version, "tier": result.tier}
        facts |= {"tier_reason": result.tier_reason, "stopped": result.stopped, "server": result.call.server}
        print_json({**facts, "outputs": {PROBABILITIES: labels} if labels else plain, "times_ms": times_ms})
        return
    how = f", tier {result.tier} ({result.tier_reason})" if result.tier else ""
    how += f", stopped by its {result.stopped}" if result.stopped else ""
    title = f"{result.model} version {result.model_version}{how}, from {result.call.server}"
    texts: dict[str, Sequence[object]] = {
        "prompt" if name in result.outputs else name: column for name, column in columns.items() if column
    }
    shown: dict[str, list[Any]] = {name: [_brief(value) for value in values] for name, values in plain.items()}
    if labels is None and len({array.shape for name, array in result.outputs.items() if name in ANSWER}) == 1:
        labels = _spans(plain)
    labels = _boxes(result.outputs) if labels is None else labels
    if labels:  # a line for each
        rows = [row for row, of_row in enumerate(labels) for _ in of_row]
        texts = {name: [column[row] for row in rows] for name, column in texts.items()}
        shown = {key: [label[key] for of_row in labels for label in of_row] for key in labels[0][0]}
    sent = columns.get("text", ())
    if sent and _labels_words(result.outputs, len(sent)):
        print_table(title, ["text", "word", "label", "probability"], _words(sent, result.outputs))
    else:  # models without a batch differ in their numbers of rows
        print_table(title, [*texts, *shown], zip_longest(*texts.values(), *shown.values(), fillvalue=""))
    if table := _cosines(result.outputs.get("embedding", _EMPTY)):
        print_table("cosines", ["", *(str(row[0]) for row in table)], table)
    print_table("time", ["stage", "ms"], list(times_ms.items()))


def labels_of(ranked: Array) -> list[list[dict[str, Any]]]:
    """Return label and probability of each row's likeliest classes, from texts VALUE:INDEX:LABEL.

    Args:
        ranked: [rows, classes], or [classes] of a model without a batch.
    """
    rows = [[text.decode(errors="backslashreplace").split(":", 2) for text in row] for row in np.atleast_2d(ranked)]
    return [[{"label": parts[-1], "probability": float(parts[0])} for parts in row] for row in rows]


def _spans(plain: Mapping[str, Any]) -> list[list[dict[str, Any]]] | None:
    """Return the outputs :data:`ANSWER` for each row's spans, without what fills a row that has fewer.

    None if they are not all there, or hold no rows of spans.
    """
    columns = [plain.get(name) for name in ANSWER]
    if not all(isinstance(column, list) and column and isinstance(column[0], list) for column in columns):
        return None
    rows = [
        [dict(zip(ANSWER, span, strict=True)) for span in zip(*row, strict=True)] for row in zip(*columns, strict=True)
    ]
    return [[span for number, span in enumerate(row) if span["answer"] or span["score"] or not number] for row in rows]


def box_prefix(outputs: Collection[str]) -> str | None:
    """Return what the names of a detector's outputs begin with; None if these outputs are not those of one."""
    wanted = ((prefix, {f"{prefix}{name}" for name in ("boxes", "scores", "classes")}) for prefix in BOX_PREFIXES)
    return next((prefix for prefix, names in wanted if names <= {*outputs}), None)


def _boxes(outputs: Mapping[str, Array]) -> list[list[dict[str, Any]]] | None:
    """Return the boxes of each picture, one without values for a picture that has none.

    None if the outputs are not those of a detector.
    """
    if (prefix := box_prefix(outputs)) is None:
        return None
    boxes, scores, classes = (outputs[f"{prefix}{name}"] for name in ("boxes", "scores", "classes"))
    labels = _plain(outputs.get(f"{prefix}labels", _EMPTY))
    columns = [labels] if labels.shape == classes.shape else []
    keys = [*["label"] * len(columns), "class", "score", "x1", "y1", "x2", "y2"]
    fits = classes.ndim == 2 and scores.shape == classes.shape and boxes.shape == (*classes.shape, 4)
    fits = fits and [array.dtype.kind for array in (boxes, scores, classes)] == ["f", "f", "i"]
    if not fits or not len(classes) or not np.isfinite(boxes).all():
        return None
    pictures = []
    for row, kept in enumerate(classes >= 0):  # the others fill rows with fewer boxes
        values = [column[row, kept].tolist() for column in (*columns, classes, scores)]
        corners = np.rint(boxes[row, kept]).astype(np.int64).T.tolist()
        lines = zip(*values, *corners, strict=True)
        pictures.append([dict(zip(keys, line, strict=True)) for line in lines] or [dict.fromkeys(keys)])
    return pictures


def print_stream(client: Client, request: InferRequest, timeout_seconds: float) -> None:
    """Print the text of each row of a request as it comes, one after the other, and a line about each on stderr.

    Raises:
        ServerError: the server refuses a row, fails, or takes longer than ``timeout_seconds`` for it.
    """
    for row in range(len(next(iter(request.inputs.values())))):
        inputs = {name: array[row : row + 1] for name, array in request.inputs.items()}
        _print_row(client, replace(request, inputs=inputs, partial_answers=True), timeout_seconds)


def _print_row(client: Client, request: InferRequest, timeout_seconds: float) -> None:
    from edge.client import InferFailure

    begun, first_ms, tokens, stopped, server = time.perf_counter(), 0.0, 0, "", ""
    try:
        for answer in client.infer_stream([request], timeout_seconds=timeout_seconds):
            if isinstance(answer, InferFailure):
                error = answer.error()
                raise ServerRefused(error.subject, given=error.given, expected=error.expected, fix=error.fix)
            piece = b"".join(answer.outputs["text"].ravel().tolist()).decode(errors="backslashreplace")
            first_ms = first_ms or 1e3 * (time.perf_counter() - begun)
            click.echo("\n".join(printable(line) for line in piece.split("\n")), nl=False)
            tokens, stopped, server = answer.outputs["generated"].item(), answer.stopped, answer.call.server
    finally:
        if first_ms:
            click.echo()
    taken = f"the first answer after {first_ms:.0f} ms, the last after {1e3 * (time.perf_counter() - begun):.0f} ms"
    remark(f"{tokens} tokens, stopped by its {stopped}; {taken}, from {server}")


def _plain(array: Array) -> Array:
    """Return BYTES as text, with invalid UTF-8 escaped, and numbers unchanged."""
    if array.dtype.kind != "O":
        return array
    return np.asarray(np.frompyfunc(lambda item: item.decode(errors="backslashreplace"), 1, 1)(array))


def _brief(value: object) -> object:
    flat = np.asarray(value, np.object_).ravel().tolist()
    if len(flat) == 1:
        return flat[0]
    shown = [f"{item:.4g}" if isinstance(item, float) else str(item) for item in flat]
    return ", ".join(shown if len(flat) <= _MOST_VALUES else [*shown[:_SHOWN_VALUES], f"… {len(flat)} values"])


def _cosines(vectors: Array) -> list[list[float]]:
    """Return for each embedding its number and its cosines with all of them; nothing for one or for many."""
    if vectors.ndim != 2 or vectors.dtype.kind != "f" or not 2 <= len(vectors) <= _MOST_COSINES:
        return []
    with np.errstate(all="ignore"):
        units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return [[number, *row] for number, row in enumerate((units @ units.T).tolist(), 1)]


def _labels_words(outputs: Mapping[str, Array], texts: int) -> bool:
    """Return whether outputs are those of a classifier of tokens for so many texts."""
    logits, labels, offsets = (outputs.get(name, _EMPTY) for name in ("logits", "labels", "offsets"))
    tokens = (texts, *labels.shape[1:2])
    numbers = (logits.dtype.kind, offsets.dtype.kind) == ("f", "i")
    return numbers and labels.shape == logits.shape[:-1] == tokens and offsets.shape == (*tokens, 2)


def _words(texts: Sequence[str], outputs: Mapping[str, Array]) -> list[list[object]]:
    """Return the number of the text, the word, and label and probability of its first token, for each word."""
    rows: list[list[object]] = []
    for number, text in enumerate(texts):
        scores = outputs["logits"][number].astype(np.float64)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        likeliest = (scores.max(axis=-1) / scores.sum(axis=-1)).tolist()
        behind = -1  # the end of the last token
        for token, (begin, end) in enumerate(outputs["offsets"][number].tolist()):
            if begin >= end:  # no text, such as padding
                continue
            if begin != behind or text[begin : begin + 1].isspace():
                label = outputs["labels"][number, token].decode(errors="backslashreplace")
                rows.append([number + 1, text[begin:end].strip(), label, likeliest[token]])
            else:
                rows[-1][1] = f"{rows[-1][1]}{text[begin:end]}"
            behind = end
    return rows
