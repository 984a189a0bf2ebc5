"""Generation: a decoder continues the prompts of several requests side by side, one token of each row per step.

Requests join and leave between two steps. Keys and values stay on the device; logits come to the host, which samples.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from edge.bundles.bundle import Bundle
from edge.bundles.preprocess import load_tokenizer
from edge.bundles.programs import GenerateProgram
from edge.bundles.steps import TokenizerPreprocess
from edge.datatypes import Array, TensorSpec, byte_size
from edge.errors import Raw, RunnerError
from edge.programs.generated_text import GeneratedText
from edge.programs.program import (
    TOKENS,
    Computed,
    Finished,
    HandedOut,
    IterativeProgram,
    Joining,
    Mover,
    Options,
    Session,
    close_gaps,
)
from edge.programs.sampling import Sampling, log_probability
from edge.protocol import LOGPROBS, STOPPED, TOKEN_IDS
from edge.runner import DecoderTensors, DeviceDecoder, Runner

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

#: Facts of each row: when its first and its last token so far were chosen, by ``time.perf_counter_ns()``, and the
#: number of tokens of its prompt.
FIRST_TOKEN_NS: Final = "first_token_ns"
LAST_TOKEN_NS: Final = "last_token_ns"
PROMPT_TOKENS: Final = "prompt_tokens"
#: The most tokens of prompts in one run, padding included, if there are several. More would only take memory: with two
#: layers of GPT-2's size in ONNX Runtime, eight prompts of 900 tokens take 1.4 GiB together, and 0.3 GiB, and no more
#: time, one by one.
_MOST_JOINED: Final = 1024
#: The outputs, beside those of the manifest, of requests that ask for log-probabilities.
BY_TOKEN: Final = (TensorSpec(LOGPROBS, "FP32", (-1, -1)), TensorSpec(TOKEN_IDS, "INT64", (-1, -1)))


class Generate(IterativeProgram):
    """Generates text with the decoder of a tier, from the inputs ``ids`` and ``mask``.

    ``runners`` are those of each tier's blocks, in their order.
    """

    generates = True

    def __init__(
        self,
        config: GenerateProgram,
        runners: Mapping[str, Sequence[Runner]],
        tokenizer: Tokenizer,
        ids: str,
        mask: str,
    ) -> None:
        self.config, self.tokenizer, self.ids, self.mask = config, tokenizer, ids, mask
        self.sampling = Sampling(config.max_tokens)
        self.tensors = DecoderTensors(
            config.tokens,
            config.lengths,
            config.last,
            config.logits,
            tuple((names.past, names.new) for names in config.cache),
            config.hidden,
        )
        self._runners = runners
        past = {names.past for names in config.cache}
        self._token_bytes = {
            tier: sum(
                byte_size(spec.datatype, spec.shape[1::2])
                for runner in blocks
                for spec in runner.inputs
                if spec.name in past
            )
            for tier, blocks in runners.items()
        }
        self._idle: dict[str, deque[DeviceDecoder]] = {tier: deque() for tier in runners}
        self._decoders: list[weakref.ref[DeviceDecoder]] = []  # of all threads

    @property
    def cache_bytes(self) -> int:
        """Memory of the keys and values, of texts in progress and of those that there is room for."""
        decoders = [reference() for reference in tuple(self._decoders)]
        return sum(decoder.cache_bytes for decoder in decoders if decoder)

    def most_cache_bytes(self, inputs: Mapping[str, Array], options: Options) -> int:
        most = (options.sampling or self.sampling).max_tokens
        tokens = np.minimum(inputs[self.mask].sum(axis=1) + most, self.config.positions).sum()
        return int(tokens) * self._token_bytes[options.tier]

    def decoder(self, tier: str) -> DeviceDecoder:
        """Return a decoder without rows, an idle one if there is one."""
        with suppress(IndexError):  # other threads take them, too
            return self._idle[tier].pop()
        first, *further = self._runners[tier]
        decoder = first.decoder(self.tensors, *further)
        self._decoders.append(weakref.ref(decoder, self._decoders.remove))
        return decoder

    def give_back(self, tier: str, decoder: DeviceDecoder) -> None:
        """Take a decoder without rows back."""
        self._idle[tier].append(decoder)

    def session(self, options: Options) -> GenerationSession:
        return GenerationSession(self, options.tier)

    def close(self) -> None:
        """Drop the decoders without rows, which refer to their runner's memory; see :meth:`Program.close`."""
        for idle in self._idle.values():
            idle.clear()


class GenerationSession(Session):
    """Rows in progress on one tier. One thread uses it."""

    def __init__(self, program: Generate, tier: str) -> None:
        self._program, self._tier = program, tier
        self._decoder: DeviceDecoder | None = None  # while there are rows
        self._requests: dict[object, list[GeneratedText]] = {}
        self._rows: list[GeneratedText] = []  # in the order of the decoder's

    @property
    def rows(self) -> int:
        return len(self._rows)

    def add(self, requests: Sequence[Joining]) -> list[Finished]:
        """Compute the prompts of requests, several in a run, and choose their first tokens; see :meth:`Session.add`."""
        program = self._program
        inputs = [request.inputs for request in requests]
        ids, mask = (np.concatenate([tensors[name] for tensors in inputs]) for name in (program.ids, program.mask))
        lengths = mask.sum(axis=1)
        joining: dict[object, list[GeneratedText]] = {}
        for request, tensors in zip(requests, inputs, strict=True):
            sampling, head = request.options.sampling or program.sampling, request.options.head
            handed_out = [] if request.handed_out is None else request.handed_out
            handed_out += [HandedOut() for _ in tensors[program.ids][len(handed_out) :]]
            joining[request.key] = [
                GeneratedText(program.config, program.tokenizer, sampling, number, head, handed)
                for number, handed in enumerate(handed_out)
            ]
        rows = [row for request_rows in joining.values() for row in request_rows]
        for row, length in zip(rows, lengths.tolist(), strict=True):
            row.prompt_tokens = length
        decoder = self._decoder or program.decoder(self._tier)
        together = max(_MOST_JOINED // ids.shape[1], 1)
        for begin in range(0, len(rows), together):
            part = slice(begin, begin + together)
            try:
                logits = decoder.add(ids[part], lengths[part])
            except BaseException:
                if begin:
                    decoder.keep(len(self._rows), [])  # without the prompts before
                raise
            _append(rows[part], logits)
        self._decoder = decoder
        self._rows += rows
        self._requests |= joining
        return self._finished()

    def step(self) -> list[Finished]:
        if not self._decoder:
            return []
        _append(self._rows, self._decoder.step(np.array([row.tokens[-1] for row in self._rows])))
        return self._finished()

    def partial(self, key: object, stopped: str = "") -> Computed:
        """Return what is new of a request's texts; see :meth:`Session.partial`.

        While it goes on, they end before anything that may become a part of a character or of a stop text.
        """
        rows = self._requests[key]
        for row in rows:
            row.stopped = row.stopped or stopped
        return self._computed(rows) if stopped else Computed(self._outputs(rows))

    def drop(self, key: object) -> None:
        rows = self._requests.pop(key, [])
        self._leave([index for index, row in enumerate(self._rows) if any(row is ended for ended in rows)])

    def _finished(self) -> list[Finished]:
        """Drop the rows that have ended, and all rows of a request with one that failed; return what is complete."""
        if not any(row.ended for row in self._rows):
            return []
        ending: list[tuple[object, list[GeneratedText], RunnerError | None]] = []
        for key, rows in self._requests.items():
            error = next((row.error for row in rows if row.error), None)
            if error or all(row.ended for row in rows):
                ending.append((key, rows, error))
                for row in rows:
                    row.error = error
        # It may fail, and then every text begins anew: before anything is handed out.
        self._leave([index for index, row in enumerate(self._rows) if row.ended])
        finished = []
        for key, rows, error in ending:
            del self._requests[key]
            try:
                computed = self._computed(rows)
            except Exception as unexpected:
                computed, error = Computed({}), _error_of(unexpected)
            finished.append(Finished(key, computed, error))
        return finished

    def _computed(self, rows: Sequence[GeneratedText]) -> Computed:
        outputs = self._outputs(rows)
        generated = outputs[self._program.config.generated]
        facts: dict[str, Array] = {
            STOPPED: np.array([row.stopped for row in rows]),
            TOKENS: generated[:, 0],
            PROMPT_TOKENS: np.array([row.prompt_tokens for row in rows]),
            FIRST_TOKEN_NS: np.array([row.first_ns for row in rows]),
            LAST_TOKEN_NS: np.array([row.last_ns for row in rows]),
        }
        return Computed(outputs, facts, float(generated.max()))

    def _outputs(self, rows: Sequence[GeneratedText]) -> dict[str, Array]:
        """Return the texts and tokens that were not handed out yet, and the numbers of all tokens."""
        config, texts = self._program.config, np.empty((len(rows), 1), np.object_)
        texts[:, 0] = [row.new_text().encode() for row in rows]
        generated = np.array([[len(row.tokens)] for row in rows], np.int32)
        outputs: dict[str, Array] = {config.text: texts, config.generated: generated}
        if rows[0].logprobs is not None:
            outputs |= _by_token(rows)
        return outputs

    def _leave(self, leaving: list[int]) -> None:
        if not leaving:
            return
        moves = close_gaps(self._rows, leaving)
        assert self._decoder
        self._decoder.keep(len(self._rows), moves)
        if not self._rows:
            self._program.give_back(self._tier, self._decoder)
            self._decoder = None


def _by_token(rows: Sequence[GeneratedText]) -> dict[str, Array]:
    """Return log-probabilities and ids of the new tokens, with zeros and -1 behind the last one of a row."""
    new = [row.new_tokens() for row in rows]
    shape = len(rows), max(part.stop - part.start for part in new)
    logprobs, ids = np.zeros(shape, np.float32), np.full(shape, -1, np.int64)
    for index, (row, part) in enumerate(zip(rows, new, strict=True)):
        assert row.logprobs is not None
        tokens = row.tokens[part]
        logprobs[index, : len(tokens)], ids[index, : len(tokens)] = row.logprobs[part], tokens
    return {LOGPROBS: logprobs, TOKEN_IDS: ids}


def _append(rows: Sequence[GeneratedText], logits: Array) -> None:
    """Append a token to each row, from logits [rows, vocabulary], which heads move; a row without finite ones fails.

    Any error fails the rows that it is of, and leaves the others alone.
    """
    headed: dict[Mover, list[int]] = {}
    for index, row in enumerate(rows):
        if row.head:
            headed.setdefault(row.head.head, []).append(index)
    for head, places in headed.items():
        alphas = np.array([[rows[index].alpha] for index in places], np.float32)
        try:
            logits[places] = head.move(logits[places], alphas)
        except Exception as error:  # of these rows alone
            for index in places:
                rows[index].error = _error_of(error)
    for index, row in enumerate(rows):
        if len(row.tokens) < row.min_tokens:
            logits[index, row.end_tokens] = -np.inf
    greedy = logits.argmax(axis=1)  # the place of a NaN, if there is one
    finite = np.isfinite(logits[np.arange(len(rows)), greedy]).tolist()
    now_ns = time.perf_counter_ns()
    for index, (row, token) in enumerate(zip(rows, greedy.tolist(), strict=True)):
        if row.error:
            continue
        if finite[index]:
            try:
                chosen = token if row.greedy else row.choose(logits[index])
                if row.logprobs is not None:
                    row.logprobs.append(log_probability(logits[index], chosen))
                row.append(chosen, now_ns)
            except Exception as error:
                row.error = _error_of(error)
        else:
            given, fix = Raw("logits that are not finite"), "Usual causes are FP16 and a broken export."
            subject = f"head with alpha {row.alpha:g}" if row.head else "decoder"
            row.error = RunnerError(subject, given=given, expected="finite logits to choose a token from", fix=fix)


def _error_of(error: Exception) -> RunnerError:
    if isinstance(error, RunnerError):
        return error
    log.error("a text failed", exc_info=error)
    given, fix = Raw(type(error).__name__), "See the log of the server, and export the model again."
    return RunnerError("text", given=given, expected="a next token and what it adds", fix=fix)


def generator(bundle: Bundle, config: GenerateProgram, runners: Mapping[str, Sequence[Runner]]) -> Generate:
    """Return the program of a bundle, with its tokenizer."""
    step = bundle.manifest.preprocess
    assert isinstance(step, TokenizerPreprocess), "checked with the manifest"
    tokenizer = load_tokenizer(bundle.read(step.file), f"file {bundle.path / step.file}")
    return Generate(config, runners, tokenizer, step.ids, step.mask)
