"""Speed by length: the same shapes on texts of 16 to 2048 tokens, dense and changed in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import nn

from edge.files import write_whole
from export.models.heads import SequenceClassifier
from export.models.transformer import LayerShape, Transformer, TransformerConfig
from export.papers.adaptive.scores import scorers, with_scores
from export.papers.adaptive.stopwatch import Stopwatch, timed_files
from export.reduce.plan import amdahl_bound, macs_per_token

#: Longer texts are timed with proportionally fewer calls.
_FULL_CALLS_TOKENS = 128
_LEAST_CALLS = 5
#: Layers of the models; more would not change the ratio.
_LAYERS = 2
_VOCABULARY = 64

LITERAL = "literal, as it runs"
#: Heads and hidden units that the smaller shapes keep, as shares.
SMALLER = {"half of the heads": (0.5, 1.0), "half of heads and units": (0.5, 0.5)}


class Length(msgspec.Struct, frozen=True):
    """One variant at one length.

    Attributes:
        ratio: dense time over its time.
        bound: Amdahl's bound: dense multiplications of the layers over its own.
    """

    tokens: int
    variant: str
    ratio: float
    bound: float


def measure_lengths(
    config: TransformerConfig,
    lengths: Sequence[int],
    calls: int,
    path: Path | None = None,
    on_length: Callable[[int, int], None] = lambda done, lengths: None,
) -> tuple[Length, ...]:
    """Time the missing lengths, with random weights.

    Args:
        config: of the model; its first layer has the shape.
        calls: of each model, up to 128 tokens.
        on_length: called with the number of lengths that are done, and of all.
    """
    done = list(_read(path))
    for number, tokens in enumerate(lengths):
        on_length(number, len(lengths))
        if any(one.tokens == tokens for one in done):
            continue
        done += _at(config, tokens, max(_LEAST_CALLS, min(calls, calls * _FULL_CALLS_TOKENS // tokens)))
        if path is not None:
            write_whole(path, msgspec.json.encode(done))
    return tuple(one for one in done if one.tokens in lengths)


def no_logits_bound(config: TransformerConfig, tokens: int) -> float:
    """Return the largest speed-up of a mechanism that only saves on the logits, Q·Kᵀ."""
    shape = config.layers[0]
    return amdahl_bound(tokens * shape.num_heads * shape.head_dim / macs_per_token(config.dim, shape, tokens))


def _at(config: TransformerConfig, tokens: int, calls: int) -> list[Length]:
    dense_shape = config.layers[0]
    dense = _model(config, dense_shape, tokens)
    watch = Stopwatch(dense, calls)

    def ratio(model: nn.Module) -> float:
        return watch.speeds(timed_files(dense, model, (tokens,)))[0].ratio

    literal = with_scores(dense, "literal", scorers(0))
    found = [Length(tokens, LITERAL, ratio(literal), no_logits_bound(config, tokens))]
    for name, (heads, units) in SMALLER.items():
        number = max(1, round(heads * dense_shape.num_heads))
        shape = msgspec.structs.replace(dense_shape, num_heads=number, ffn_dim=round(units * dense_shape.ffn_dim))
        macs = [macs_per_token(config.dim, one, tokens) for one in (dense_shape, shape)]
        found.append(Length(tokens, name, ratio(_model(config, shape, tokens)), macs[0] / macs[1]))
    return found


def _model(config: TransformerConfig, shape: LayerShape, tokens: int) -> SequenceClassifier:
    layers = (shape,) * _LAYERS
    longer = msgspec.structs.replace(config, layers=layers, max_positions=tokens, vocab_size=_VOCABULARY)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SequenceClassifier(Transformer(longer), 2).eval()


def _read(path: Path | None) -> list[Length]:
    if path is None or not path.exists():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Length])
    except msgspec.DecodeError:  # it can be measured again
        return []
