"""All metrics of a language model on examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from edge.bundles.manifest import Measure
from edge.errors import Raw
from export.errors import DataError
from export.generate.answers import parse_answer
from export.generate.backbone import positions_of
from export.generate.decoding import GREEDY, Decoding, complete
from export.generate.formats import Example
from export.generate.metrics import answer_measures, token_measures
from export.generate.objective import teacher_forced
from export.generate.tokenizer import Encoded, TextTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    """Return the metrics of :mod:`export.generate.metrics` on examples.

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


def completion_limit(trained_on: Sequence[Encoded]) -> int:
    """Return the most tokens of a completion: a quarter more than the longest one that a model was trained on."""
    return max(int(row.learnt.sum()) for row in trained_on) * 5 // 4


def encode_fitting(tokenizer: TextTokenizer, examples: Sequence[Example], positions: int) -> list[Encoded]:
    """Return examples as tokens, of those that are :func:`fitting`."""
    return [row for _, row in fitting(tokenizer, examples, positions)]


def fitting(tokenizer: TextTokenizer, examples: Sequence[Example], positions: int) -> list[tuple[Example, Encoded]]:
    """Return examples, also as tokens, without those that have more tokens than there are positions.

    Raises:
        DataError: none is left.
    """
    pairs = [(one, row) for one in examples if len((row := tokenizer.encode(one)).ids) <= positions]
    if not pairs:
        given, expected = Raw(f"{len(examples)}, all longer"), f"some of at most {positions} tokens"
        raise DataError("examples", given=given, expected=expected, fix="Give a model with more positions.")
    return pairs
