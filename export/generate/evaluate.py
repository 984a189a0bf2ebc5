"""Metrics of a language model on examples: cross-entropy of tokens with prompts masked, and answers in its texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from edge.bundles.manifest import Measure
from edge.datatypes import Array
from edge.errors import Raw
from export.data.tokens import sorted_batches
from export.errors import DataError
from export.generate.decoding import GREEDY, Decoding, complete
from export.generate.formats import Example, parse_answer, parse_number, same_answer
from export.generate.model import positions_of
from export.generate.tokenizer import EncodedExample, TextTokenizer
from export.training.device import model_device, multiplying_in
from export.training.intervals import item_shares, known_interval, known_middle, mean, mean_measure
from export.training.recipe import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TextBatch(NamedTuple):
    """Examples of similar length, padded on the right, which a causal model never looks at."""

    ids: Tensor  # [B, T], int64
    learnt: Tensor  # [B, T], bool: the tokens with a loss


class TeacherForced(NamedTuple):
    """Predictions of tokens, [n] each, row by row."""

    rows: Array  # the row of each token
    losses: Array  # cross-entropies in nats
    predicted: Array  # the most likely token
    targets: Array  # the right token


def padded(rows: Sequence[EncodedExample], device: torch.device) -> TextBatch:
    """Return rows as a batch on a device, padded with zeros that are not learnt."""
    ids, learnt = (pad_sequence(list(map(torch.from_numpy, of)), batch_first=True) for of in zip(*rows, strict=True))
    return TextBatch(ids.long().to(device), learnt.to(device))


def learnt_logits(model: nn.Module, batch: TextBatch, precision: Precision = "fp32") -> tuple[Tensor, Tensor]:
    """Return the logits of each token that is learnt, [n, V] in FP32, and the tokens, [n], row by row."""
    before = functional.pad(batch.learnt[:, 1:], (0, 1))

    def choose(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (inputs[0][before],)

    # The last layer has most of the work where V is large, and only these positions need it.
    last: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    hook = last.register_forward_pre_hook(choose)
    try:
        with multiplying_in(precision, batch.ids.device):
            logits: Tensor = model(batch.ids, use_cache=False).logits
    finally:
        hook.remove()
    return logits.float(), batch.ids[:, 1:][batch.learnt[:, 1:]]


@torch.inference_mode()
def teacher_forced(model: nn.Module, rows: Sequence[EncodedExample], batch_size: int = 32) -> TeacherForced:
    """Return what a model predicts at each learnt token of some rows, given the right ones before it."""
    device = model_device(model)
    by_row: list[Array] = [np.empty((0, 3))] * len(rows)
    for numbers in sorted_batches(np.array([len(row.ids) for row in rows]), batch_size):
        batch = padded([rows[number] for number in numbers], device)
        logits, targets = learnt_logits(model, batch)
        losses = functional.cross_entropy(logits, targets, reduction="none")
        tokens = np.stack([column.cpu().double().numpy() for column in (losses, logits.argmax(1), targets)], axis=1)
        ends = np.cumsum(batch.learnt[:, 1:].sum(1).cpu().numpy())
        for number, part in zip(numbers, np.split(tokens, ends[:-1]), strict=True):
            by_row[number] = part
    nats, predicted, right = np.concatenate(by_row).T
    of_tokens = np.repeat(np.arange(len(rows)), [len(part) for part in by_row])
    return TeacherForced(of_tokens, nats, predicted.astype(np.int64), right.astype(np.int64))


def evaluate(
    model: PreTrainedModel,
    tokenizer: TextTokenizer,
    split: str,
    examples: Sequence[Example],
    decoding: Decoding = GREEDY,
    *,
    max_tokens: int,
    batch_size: int = 32,
    on_batch: Callable[[int], None] = lambda size: None,
) -> tuple[Measure, ...]:
    """Return :func:`token_measures` and :func:`answer_measures` on examples.

    Those of tokens are without the examples that have more tokens than the model has positions; those of answers are
    over all examples.

    Args:
        max_tokens: of a completion. It must not come from these examples, whose answers the model does not know.
        on_batch: is called with the number of examples of each batch that is completed.

    Raises:
        DataError: no example fits into the model's positions.
    """
    rows = encode_fitting(tokenizer, examples, positions_of(model))
    prompts = [example.prompt for example in examples]
    texts = complete(model, tokenizer, prompts, max_tokens, decoding, batch_size=batch_size, on_batch=on_batch)
    return (
        *token_measures(split, teacher_forced(model, rows, batch_size)),
        *answer_measures(split, [parse_answer(text) for text in texts], [example.answer for example in examples]),
    )


def completion_limit(trained_on: Sequence[EncodedExample]) -> int:
    """Return the most tokens of a completion: a quarter more than the longest one that a model was trained on."""
    return max(int(row.learnt.sum()) for row in trained_on) * 5 // 4


def encode_fitting(tokenizer: TextTokenizer, examples: Sequence[Example], positions: int) -> list[EncodedExample]:
    """Return examples as tokens, of those that are :func:`fitting`."""
    return [row for _, row in fitting(tokenizer, examples, positions)]


def fitting(
    tokenizer: TextTokenizer, examples: Sequence[Example], positions: int
) -> list[tuple[Example, EncodedExample]]:
    """Return examples, also as tokens, without those that have more tokens than there are positions.

    Raises:
        DataError: none is left.
    """
    pairs = [(example, row) for example in examples if len((row := tokenizer.encode(example)).ids) <= positions]
    if not pairs:
        given, expected = Raw(f"{len(examples)}, all longer"), f"some of at most {positions} tokens"
        raise DataError("examples", given=given, expected=expected, fix="Give a model with more positions.")
    return pairs


def token_measures(split: str, forced: TeacherForced) -> tuple[Measure, ...]:
    """Return cross-entropy (nats per token) and perplexity, and precision, recall and F1 of the most likely tokens.

    The last three are averages over all tokens of the vocabulary that occur among the targets or the predictions, each
    token with the same weight; a token that is never predicted has precision 0. Intervals are over examples.
    """
    examples = int(forced.rows[-1]) + 1
    sums, counts = (np.bincount(forced.rows, weights) for weights in (forced.losses, None))
    value = float(forced.losses.mean())
    bounds = known_interval(_ratio_of_sums, sums, counts)
    of_perplexity = (float(np.exp(bounds[0])), float(np.exp(bounds[1]))) if bounds else None
    losses = (
        Measure("cross_entropy", split, value, examples, interval=bounds),
        Measure("perplexity", split, float(np.exp(value)), examples, interval=of_perplexity),
    )
    shares = item_shares(examples)
    tables = [table.astype(np.float64) for table in _token_counts(forced, examples)]
    whole = _scores(*(table.mean(axis=0) for table in tables))
    # Without rare tokens, which are predicted worst, resamples would be better than the whole: a token that does not
    # occur in one keeps its score.
    hits, predicted, right = (shares @ table for table in tables)
    resampled = _scores(hits, predicted, right, whole)
    return losses + tuple(
        Measure(f"token_{name}", split, float(of_tokens.mean()), examples, interval=known_middle(mean(resampled[name])))
        for name, of_tokens in whole.items()
    )


def answer_measures(split: str, given: Sequence[str | None], right: Sequence[str]) -> tuple[Measure, ...]:
    """Return the exact match of answers, and for those that should be numbers the errors and the unparsable rate.

    ``mse`` and ``rmse`` are over the answers that are numbers; ``unparsable`` is the share of those that are not.

    Args:
        given: by :func:`export.generate.formats.parse_answer`.
    """
    pairs = list(zip(given, right, strict=True))
    measures = [mean_measure("exact_match", split, np.array([same_answer(*pair) for pair in pairs]))]
    numbers = [(parse_number(mine), wanted) for mine, text in pairs if (wanted := parse_number(text)) is not None]
    if numbers:
        measures.append(mean_measure("unparsable", split, np.array([mine is None for mine, _ in numbers])))
    squares = np.array([float(mine - wanted) ** 2 for mine, wanted in numbers if mine is not None])
    if squares.size:
        for metric, of in (("mse", mean), ("rmse", _root_mean)):
            value, bounds = float(of(squares)), known_interval(of, squares)
            measures.append(Measure(metric, split, value, len(squares), interval=bounds))
    return tuple(measures)


def _ratio_of_sums(numerators: Array, denominators: Array) -> Array:
    return np.asarray(numerators.sum(axis=-1) / denominators.sum(axis=-1))


def _root_mean(squares: Array) -> Array:
    return np.sqrt(mean(squares))


def _token_counts(forced: TeacherForced, examples: int) -> Array:
    """Return how often each token that occurs is predicted rightly, predicted, and right, [3, examples, tokens]."""
    tokens, indices = np.unique(np.concatenate([forced.predicted, forced.targets]), return_inverse=True)
    predicted, targets = np.split(indices, 2)
    hit = predicted == targets
    counts = np.zeros((3, examples, len(tokens)), dtype=np.int32)
    np.add.at(counts[0], (forced.rows[hit], targets[hit]), 1)
    np.add.at(counts[1], (forced.rows, predicted), 1)
    np.add.at(counts[2], (forced.rows, targets), 1)
    return counts


def _scores(hits: Array, predicted: Array, right: Array, absent: Mapping[str, Array] | None = None) -> dict[str, Array]:
    """Return the scores of each token, the last axis; those of tokens that do not occur are ``absent``."""
    scores = {}
    for name, factor, denominators in (("precision", 1, predicted), ("recall", 1, right), ("f1", 2, predicted + right)):
        ratio = np.divide(factor * hits, denominators, out=np.zeros_like(hits), where=denominators > 0)
        scores[name] = ratio if absent is None else np.where(predicted + right > 0, ratio, absent[name])
    return scores
