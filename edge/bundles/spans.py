"""Spans of a context that answer a question: windows of a long context, and the likeliest spans of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edge.bundles.steps import SpanPostprocess, WindowShape
from edge.datatypes import Array

if TYPE_CHECKING:
    from tokenizers import Encoding


class Window(NamedTuple):
    """A part of a context in a row of tokens.

    Attributes:
        first: number of its first token in the context.
        position: of that token in the row.
        length: its tokens; 0 of an empty context.
    """

    first: int
    position: int
    length: int


class Context(NamedTuple):
    """A context, whose windows are rows of their own, with the characters of each of its tokens, [tokens, 2]."""

    text: str
    offsets: Array
    windows: tuple[Window, ...]


class Span(NamedTuple):
    """An answer: its characters in the context, none for no answer, and its score, 0 to 1."""

    begin: int
    end: int
    score: float


def cut(text: str, encoding: Encoding, most: int, shape: WindowShape) -> tuple[list[Array], Context]:
    """Return the tokens of each window of a question and its context, ``text``, and the context.

    The tokens are indices [n] into the uncut row that ``encoding`` has. Arguments as those of :func:`_windows_of`.
    """
    parts = np.array([-1 if part is None else part for part in encoding.sequence_ids], np.int64)
    found = list(_windows_of(parts, most, shape))
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)[parts == 1]
    return [indices for indices, _ in found], Context(text, offsets, tuple(window for _, window in found))


def _windows_of(parts: Array, most: int, windows: WindowShape) -> Iterator[tuple[Array, Window]]:
    """Yield the tokens of each window, as indices [n] into the uncut row, and the window.

    Args:
        parts: of each token, [tokens]: 0 of the question, 1 of the context behind it, and -1 of neither.
        most: tokens of a window, more than the special ones, those of the question and the stride.
    """
    cut = np.flatnonzero(parts == 0)[windows.question_tokens :]
    kept = np.delete(np.arange(len(parts)), cut)
    context = kept[parts[kept] == 1]
    if not len(context):
        yield kept, Window(0, 0, 0)
        return
    before, behind = kept[kept < context[0]], kept[kept > context[-1]]
    room = most - len(before) - len(behind)
    for first in range(0, max(len(context) - windows.stride, 1), room - windows.stride):
        part = context[first : first + room]
        yield np.concatenate([before, part, behind]), Window(first, len(before), len(part))


def extract(
    step: SpanPostprocess, starts: Array, ends: Array, contexts: Sequence[Context], n_best: int
) -> dict[str, Array]:
    """Return the outputs of a step: for each context its likeliest spans, the likeliest first, [contexts, columns].

    There are at most ``n_best`` columns. Behind the last span of a row, the texts are empty and the numbers 0.

    Args:
        starts, ends: finite logits of a span's first and last token, [windows of all contexts, tokens].
    """
    ranked, row = list[list[Span]](), 0
    for context in contexts:
        rows = slice(row, row + len(context.windows))
        ranked.append(likeliest(step, [*starts[rows]], [*ends[rows]], context, n_best))
        row = rows.stop
    shape = len(ranked), max(1, *map(len, ranked))
    texts, scores = np.full(shape, b"", np.object_), np.zeros(shape, np.float32)
    begins, stops = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for number, (context, spans) in enumerate(zip(contexts, ranked, strict=True)):
        for column, (begin, end, score) in enumerate(spans):
            place = number, column
            texts[place], scores[place] = context.text[begin:end].encode(), score
            begins[place], stops[place] = begin, end
    return {step.answer: texts, step.score: scores, step.start: begins, step.end: stops}


def likeliest(
    step: SpanPostprocess, starts: Sequence[Array], ends: Sequence[Array], context: Context, n_best: int
) -> list[Span]:
    """Return the likeliest spans of a context, the likeliest first, at most ``n_best``; empty if it has no text.

    A span is in one window and in the context alone, and has at most ``most_tokens``. Its score is the probability of
    its first token times that of its last, of all tokens of the context and the row's first token, the summary, which
    stands for no answer. A token in several windows counts once, with its largest logit; the summary with that of the
    window that is least sure of no answer. Of one window, these are the scores of Transformers 4's pipeline.

    Args:
        starts, ends: finite logits of a span's first and last token, [tokens] for each window.
    """
    tokens = len(context.offsets)
    sums = np.full((tokens, step.most_tokens), -np.inf)  # by the first token, and how many follow it
    firsts, lasts = np.full((2, tokens), -np.inf)
    is_text = context.offsets[:, 0] < context.offsets[:, 1]
    for window, start, end in zip(context.windows, starts, ends, strict=True):
        inside, of_row = (slice(begin, begin + window.length) for begin in (window.first, window.position))
        start, end = (np.where(is_text[inside], values[of_row].astype(np.float64), -np.inf) for values in (start, end))
        np.maximum(firsts[inside], start, out=firsts[inside])
        np.maximum(lasts[inside], end, out=lasts[inside])
        for more in range(min(step.most_tokens, window.length)):
            best = sums[window.first : window.first + window.length - more, more]
            np.maximum(best, start[: window.length - more] + end[more:], out=best)
    none = min(((float(start[0]), float(end[0])) for start, end in zip(starts, ends, strict=True)), key=sum)
    total = sum(np.logaddexp.reduce(np.append(of, one)) for of, one in zip((firsts, lasts), none, strict=True))
    spans = [*_distinct(context, sums, n_best), *([(0, 0, sum(none))] if step.no_answer else [])]
    spans.sort(key=lambda span: -span[2])  # stable: at the same sum, an answer comes before none
    return [Span(begin, end, float(np.exp(value - total))) for begin, end, value in spans[:n_best]]


def _distinct(context: Context, sums: Array, n_best: int) -> list[tuple[int, int, float]]:
    """Return the characters of the spans with the largest sums, each once, without spaces around them, and the sums.

    Of equal sums, the span that begins first comes first. Several tokens may be of one character.
    """
    flat, most, may_be_blank = sums.ravel(), int(np.isfinite(sums).sum()), True
    found: dict[tuple[int, int], float] = {}
    wanted = min(n_best, most)
    while wanted:
        largest = np.flatnonzero(flat >= np.partition(flat, -wanted)[-wanted])
        for index in largest[np.argsort(-flat[largest], kind="stable")].tolist():
            first, more = divmod(index, sums.shape[1])
            begin, end = int(context.offsets[first, 0]), int(context.offsets[first + more, 1])
            text = context.text[begin:end]
            begin, end = begin + len(text) - len(text.lstrip()), begin + len(text.rstrip())
            if begin < end:
                found.setdefault((begin, end), float(flat[index]))
            if len(found) == n_best:
                break
        if len(found) == n_best or wanted == most:
            break
        if may_be_blank:  # once and not before, because few contexts have so many
            _drop_blank(context, sums)
            most, may_be_blank = int(np.isfinite(sums).sum()), False
        wanted = min(4 * wanted, most)
    return [(*span, value) for span, value in found.items()]


def _drop_blank(context: Context, sums: Array) -> None:
    """Make the sums of spans of spaces alone -inf."""
    tokens, (begins, ends) = np.arange(len(sums)), context.offsets.T
    ends = np.maximum(ends, np.append(begins[1:], 0))  # with characters that no token has
    is_text = [bool(context.text[begin:end].strip()) for begin, end in zip(begins, ends, strict=True)]
    following = np.minimum.accumulate(np.where(is_text, tokens, len(tokens))[::-1])[::-1]  # token with text
    sums[np.arange(sums.shape[1]) < (following - tokens)[:, None]] = -np.inf
