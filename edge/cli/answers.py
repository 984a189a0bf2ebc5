"""The answer of a model as tables: texts beside outputs, likeliest labels, labels of words, and cosines of vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from edge.cli.output import print_table
from edge.datatypes import Array

_EMBEDDING, _LOGITS, _LABELS, _OFFSETS = "embedding", "logits", "labels", "offsets"
#: A longer value is shown by the first of its numbers and how many they are.
_MOST_VALUES, _SHOWN_VALUES = 8, 3
_MOST_COSINES = 20


def print_answer(
    title: str,
    columns: Mapping[str, Sequence[str]],
    outputs: Mapping[str, Array],
    plain: Mapping[str, list[Any]],
    labels: list[list[dict[str, Any]]] | None,
) -> None:
    """Print an answer.

    Args:
        columns: the texts that were sent, or the paths of images, by input.
        plain: the outputs as lists of numbers and texts.
        labels: label and probability of the likeliest classes of each row, to be shown in place of the outputs.
    """
    texts: dict[str, Sequence[object]] = {
        "prompt" if name in outputs else name: column for name, column in columns.items() if column
    }
    sent = columns.get("text", ())
    if sent and _labels_words(outputs, len(sent)):
        print_table(title, ["text", "word", "label", "probability"], _words(sent, outputs))
        return
    shown: Mapping[str, Sequence[object]] = {name: [_brief(value) for value in of] for name, of in plain.items()}
    if labels:  # a line for each
        places = [row for row, of_row in enumerate(labels) for _ in of_row]
        texts = {name: [column[row] for row in places] for name, column in texts.items()}
        shown = {key: [one[key] for of_row in labels for one in of_row] for key in ("label", "probability")}
    # Models without a batch differ in their numbers of rows.
    print_table(title, [*texts, *shown], zip_longest(*texts.values(), *shown.values(), fillvalue=""))
    if table := _cosines(outputs):
        print_table("cosines", ["", *(str(row[0]) for row in table)], table)


def _brief(value: object) -> object:
    if not isinstance(value, list):
        return value
    flat = np.asarray(value, np.object_).ravel().tolist()
    if len(flat) == 1:
        return flat[0]
    shown = [f"{item:.4g}" if isinstance(item, float) else str(item) for item in flat]
    return ", ".join(shown if len(flat) <= _MOST_VALUES else [*shown[:_SHOWN_VALUES], f"… {len(flat)} values"])


def _cosines(outputs: Mapping[str, Array]) -> list[list[float]]:
    """Return for each embedding its number and its cosines with all of them; nothing for one or for many."""
    vectors = outputs.get(_EMBEDDING, np.zeros(0))
    if vectors.ndim != 2 or vectors.dtype.kind != "f" or not 2 <= len(vectors) <= _MOST_COSINES:
        return []
    with np.errstate(all="ignore"):
        units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return [[number, *row] for number, row in enumerate((units @ units.T).tolist(), 1)]


def _labels_words(outputs: Mapping[str, Array], texts: int) -> bool:
    """Return whether outputs are those of a classifier of tokens for so many texts."""
    logits, labels, offsets = (outputs.get(name, np.zeros(0)) for name in (_LOGITS, _LABELS, _OFFSETS))
    tokens = labels.shape
    numbers = (logits.dtype.kind, offsets.dtype.kind) == ("f", "i")
    return (
        numbers
        and len(tokens) == 2
        and tokens[0] == texts
        and (logits.shape[:-1], offsets.shape) == (tokens, (*tokens, 2))
    )


def _words(texts: Sequence[str], outputs: Mapping[str, Array]) -> list[list[object]]:
    """Return the number of the text, the word, and label and probability of its first token, for each word."""
    rows: list[list[object]] = []
    for number, text in enumerate(texts):
        scores = outputs[_LOGITS][number].astype(np.float64)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        likeliest = (scores.max(axis=-1) / scores.sum(axis=-1)).tolist()
        behind = -1  # the end of the last token
        for token, (begin, end) in enumerate(outputs[_OFFSETS][number].tolist()):
            if begin >= end:  # no text, such as padding
                continue
            if begin != behind or text[begin : begin + 1].isspace():
                label = outputs[_LABELS][number, token].decode(errors="backslashreplace")
                rows.append([number + 1, text[begin:end].strip(), label, likeliest[token]])
            else:
                rows[-1][1] = f"{rows[-1][1]}{text[begin:end]}"
            behind = end
    return rows
