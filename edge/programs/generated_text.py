"""The text of a row that a decoder generates: its tokens and pieces so far, and what ends it."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING, Final

from edge.bundles.programs import GenerateProgram
from edge.errors import RunnerError
from edge.programs.program import AppliedHead, HandedOut
from edge.programs.sampling import Sampler, Sampling
from edge.protocol import BY_LENGTH, BY_STOP

if TYPE_CHECKING:
    from tokenizers import Tokenizer


#: Tokens that may be the first bytes of a character of four.
_MOST_INCOMPLETE: Final = 3
#: If more tokens add nothing to a text, some of them are no part of a character. Each further one takes longer.
_MOST_WAITING: Final = 12


class Pieces:
    """The pieces of a text, token by token; together they are what the tokenizer makes of all tokens.

    Where bytes are no character, they have replacement characters and may keep the characters beside them, which the
    tokenizer would replace, too.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._begin()

    def add(self, token: int) -> str:
        """Return what a token adds to the text: nothing if it is special, or ends in the middle of a character."""
        waiting = self._waiting
        waiting.append(token)
        try:
            piece = self._stream.step(self._tokenizer, token)
        except Exception:  # with bytes that are no character, the tokenizer replaces the one before them, which is sent
            return self._anew(waiting)
        if piece:
            waiting.clear()
            return piece
        if len(waiting) > _MOST_WAITING:
            early = self._tokenizer.decode(waiting[:-_MOST_INCOMPLETE], skip_special_tokens=True)
            if early:
                return early + self._anew(waiting[-_MOST_INCOMPLETE:])
        return ""

    def _begin(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(skip_special_tokens=True)
        self._waiting: list[int] = []  # the tokens after the last piece

    def _anew(self, tokens: list[int]) -> str:
        self._begin()
        text = ""
        for token in tokens:
            self._waiting.append(token)
            if piece := self._stream.step(self._tokenizer, token):
                text += piece
                self._waiting.clear()
        return text


class GeneratedText:
    """The text of a row in progress: ``number`` is of the row in its request, ``head`` moves its logits."""

    def __init__(
        self,
        config: GenerateProgram,
        tokenizer: Tokenizer,
        sampling: Sampling,
        number: int,
        head: AppliedHead | None,
        handed_out: HandedOut,
    ) -> None:
        self.head, self.alpha = head, head.alpha if head else 0.0
        self._config, self._sampling, self.handed_out = config, sampling, handed_out
        self._pieces = Pieces(tokenizer)
        sampler = Sampler(sampling, number)
        self.greedy, self.choose = sampler.greedy, sampler.choose
        self.min_tokens, self.end_tokens = sampling.min_tokens, list(config.end_tokens)
        self.tokens: list[int] = []
        self.logprobs: list[float] | None = [] if sampling.logprobs else None  # of the tokens, if they are to be sent
        self._text = StringIO(newline="")  # appending to a str would copy it for each token
        self.length = 0  # characters of it
        self._overlap = max(map(len, sampling.stop), default=1) - 1  # characters of a stop text that more may complete
        self._unsearched = 0  # characters that come too early for a stop text
        self.stopped = ""
        self.error: RunnerError | None = None
        self.prompt_tokens = 0
        self.first_ns = self.last_ns = 0

    @property
    def ended(self) -> bool:
        """Whether it takes no further token."""
        return bool(self.stopped or self.error)

    def append(self, token: int, now_ns: int) -> None:
        """Append a token, and end the text if it is the last one."""
        self.tokens.append(token)
        self.first_ns, self.last_ns = self.first_ns or now_ns, now_ns
        if token in self.end_tokens and not self._sampling.ignore_eos:
            self.stopped = BY_STOP
            return
        if piece := self._pieces.add(token):
            self._add(piece)
        if self.stopped:
            return
        if len(self.tokens) >= self._sampling.max_tokens or self._full():
            self.stopped = BY_LENGTH

    def new_text(self) -> str:
        """Hand out the text after what was handed out, without an end that may become a stop text."""
        begin = self.handed_out.characters
        self.handed_out.characters = end = max(self._final_length(), begin)
        return self._part(begin, end)

    def new_tokens(self) -> slice:
        """Hand out the tokens after those that were handed out; return which ones they are."""
        begin, self.handed_out.tokens = self.handed_out.tokens, max(len(self.tokens), self.handed_out.tokens)
        return slice(begin, self.handed_out.tokens)

    def _final_length(self) -> int:
        if self.stopped or not self._sampling.stop:
            return self.length
        tail = self._part(max(self.length - self._overlap, 0), self.length)
        return self.length - len(tail) + min(_begin(tail, stop) for stop in self._sampling.stop)

    def _part(self, begin: int, end: int) -> str:
        self._text.seek(begin)
        return self._text.read(max(end - begin, 0))

    def _add(self, piece: str) -> None:
        begin = max(self.length - self._overlap, self._unsearched)
        self._text.seek(self.length)
        self._text.write(piece)
        self.length += len(piece)
        if len(self.tokens) < self.min_tokens:
            self._unsearched = self.length
        elif self._sampling.stop:
            tail = self._part(begin, self.length)
            if ends := [end for stop in self._sampling.stop if (end := tail.find(stop)) >= 0]:
                self.length, self.stopped = begin + min(ends), BY_STOP

    def _full(self) -> bool:
        return self.prompt_tokens + len(self.tokens) >= self._config.positions


def _begin(text: str, stop: str) -> int:
    """Return where a stop text may begin that the text does not contain as a whole; its length if nowhere."""
    start = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
