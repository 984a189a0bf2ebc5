"""Rows of a decoder of the letters, whose logits are checked against those of all tokens so far."""

import numpy as np

from tests.support.letters_model import LETTERS


class Rows:
    """Rows of a decoder, and all of their tokens."""

    def __init__(self, decoder):
        self.decoder = decoder
        self.tokens = []
        self._next = 0

    @property
    def lengths(self):
        return [len(row) for row in self.tokens]

    def join(self, *lengths):
        prompts = [[self._token() for _ in range(length)] for length in lengths]
        ids = np.full((len(prompts), max(lengths)), self._token(), np.int64)  # anything behind the prompts
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = prompt
        logits = self.decoder.add(ids, np.array(lengths))
        self.tokens += prompts
        self._check(logits, self.tokens[-len(prompts) :])

    def step(self):
        if self.tokens:
            for tokens in self.tokens:
                tokens.append(self._token())
            self._check(self.decoder.step(np.array([tokens[-1] for tokens in self.tokens])), self.tokens)

    def leave(self, *places):
        leaving = sorted(place for place in places if place < len(self.tokens))
        rows = len(self.tokens) - len(leaving)
        gaps = [place for place in leaving if place < rows]
        staying = [place for place in range(rows, len(self.tokens)) if place not in leaving]
        moves = list(zip(staying, gaps, strict=True))
        for source, target in moves:
            self.tokens[target] = self.tokens[source]
        del self.tokens[rows:]
        self.decoder.keep(rows, moves)

    def _token(self):
        self._next = self._next * 5 % 23 + 1  # never one that has no logits
        return self._next

    def _check(self, logits, tokens):
        """Check that the logits are those of all tokens of each row, computed anew."""
        totals = np.array([[sum(row) % len(LETTERS)] for row in tokens])
        np.testing.assert_array_equal(logits, -np.abs(np.arange(len(LETTERS)) - totals))
