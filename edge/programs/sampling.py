"""The choice of the next token from logits: greedy, or drawn at a temperature from the likeliest tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from edge.bundles.programs import GenerateProgram
from edge.datatypes import Array
from edge.errors import InvalidRequest, Raw

#: Stop strings of a request, and the characters of each.
MOST_STOPS, LONGEST_STOP = 4, 256
_MOST_SEED = 2**63 - 1


class Sampling(NamedTuple):
    """How to generate the text of a request."""

    max_tokens: int  # of the text, after which it ends
    temperature: float = 0.0  # that the logits are divided by; 0 takes the likeliest token
    top_k: int = 0  # draw from so many of the likeliest tokens; 0 from all
    top_p: float = 1.0  # draw from the fewest likeliest tokens whose probabilities sum up to this, after ``top_k``
    seed: int | None = None  # of the draws; None is a new one for each request
    stop: tuple[str, ...] = ()  # texts that end the generated text, which does not include them
    logprobs: bool = False  # whether to return the tokens and their log-probabilities, too
    min_tokens: int = 0  # before which the text neither ends nor has a stop text
    ignore_eos: bool = False  # whether tokens that would end the text do not


def sampling_of(config: GenerateProgram, model: str, given: Mapping[str, Any]) -> Sampling:
    """Return how to generate the text of a request that sets some fields of :class:`Sampling`.

    Raise an InvalidRequest, which names the model, for a value out of range.
    """
    sampling = Sampling(**{"max_tokens": config.max_tokens, **given})
    _require(model, "max_tokens", sampling.max_tokens, 1, config.positions - 1)
    _require(model, "min_tokens", sampling.min_tokens, 0, sampling.max_tokens)
    _require(model, "temperature", sampling.temperature, 0, 100)
    _require(model, "top_k", sampling.top_k, 0, 2**31 - 1)
    _require(model, "top_p", sampling.top_p, 0, 1, open_below=True)
    if sampling.seed is not None:
        _require(model, "seed", sampling.seed, 0, _MOST_SEED)
    subject, fix = f"parameter 'stop' of {model!r}", "Give fewer or shorter texts."
    if len(sampling.stop) > MOST_STOPS:
        given_stops = Raw(f"{len(sampling.stop)} texts")
        raise InvalidRequest(subject, given=given_stops, expected=f"at most {MOST_STOPS}", fix=fix)
    for text in sampling.stop:
        if not 1 <= len(text) <= LONGEST_STOP:
            length = Raw(f"a text of {len(text)} characters")
            raise InvalidRequest(subject, given=length, expected=f"1 to {LONGEST_STOP}", fix=fix)
    return sampling


def _require(model: str, name: str, value: float, least: float, most: float, *, open_below: bool = False) -> None:
    if math.isfinite(value) and least <= value <= most and not (open_below and value == least):
        return
    expected = f"above {least} and at most {most}" if open_below else f"{least} to {most}"
    fix = "Leave it out for the default, or give a number in this range."
    raise InvalidRequest(f"parameter {name!r} of {model!r}", given=value, expected=expected, fix=fix)


def log_probability(logits: Array, token: int) -> float:
    """Return the logarithm of a token's probability for logits [vocabulary], at a temperature of 1."""
    shifted = logits - logits.max()
    return float(shifted[token] - np.log(np.exp(shifted).sum(dtype=np.float64)))


class Sampler:
    """Chooses the tokens of one row."""

    def __init__(self, sampling: Sampling, row: int) -> None:
        self._sampling = sampling
        self.greedy = sampling.temperature == 0
        seed = sampling.seed
        self._random = None if self.greedy else np.random.default_rng(None if seed is None else (seed, row))

    def choose(self, logits: Array) -> int:
        """Return a token for logits [vocabulary], which must be finite or -infinity."""
        if self._random is None:
            return int(logits.argmax())
        sampling = self._sampling
        # The largest becomes 0, so that no temperature makes it infinite.
        tokens, scaled = None, (logits.astype(np.float64) - logits.max()) / sampling.temperature
        if 0 < sampling.top_k < len(scaled):
            tokens = np.argpartition(scaled, -sampling.top_k)[-sampling.top_k :]
            scaled = scaled[tokens]
        weights = np.exp(scaled)
        if sampling.top_p < 1:
            order = np.argsort(-weights, kind="stable")
            sums = np.cumsum(weights[order])
            order = order[: int(np.searchsorted(sums, sampling.top_p * sums[-1])) + 1]
            tokens = order if tokens is None else tokens[order]
            weights = weights[order]
        sums = np.cumsum(weights)
        index = int(np.searchsorted(sums, self._random.random() * sums[-1], side="right"))
        return int(index if tokens is None else tokens[index])
