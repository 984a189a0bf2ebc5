"""Plain text as tokens in one array, from which batches are gathered on the device that trains."""

from __future__ import annotations

import lzma
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from edge.datatypes import Array
from edge.errors import Raw
from export.data.tokens import Batch
from export.errors import DataError

#: Tensor cores want lengths that are multiples of this.
_MULTIPLE = 8
#: Batches that are sorted by length together: more of them have less padding, and mix the lengths less.
_BATCHES_PER_BUCKET = 64


class Passages(NamedTuple):
    """Passages of a text.

    Attributes:
        tokens: of all passages, one after the other, [n].
        starts: index of the first token of each passage, [passages].
        lengths: number of tokens of each passage, [passages]; it stays on the CPU.
    """

    tokens: Tensor
    starts: Tensor
    lengths: Array

    def to(self, device: torch.device) -> Passages:
        """Return the passages on a device."""
        return self._replace(tokens=self.tokens.to(device), starts=self.starts.to(device))

    def split(self, held_out: int, seed: int = 0) -> tuple[Passages, Passages]:
        """Return all passages but some, and these, chosen at random."""
        order = np.random.default_rng(seed).permutation(len(self.lengths))
        return self.chosen(order[held_out:]), self.chosen(order[:held_out])

    def chosen(self, rows: Array) -> Passages:
        """Return some of the passages."""
        return Passages(self.tokens, self.starts[torch.from_numpy(rows)], self.lengths[rows])

    def batch(self, rows: Array) -> Batch:
        """Return passages by their indices, padded with zeros."""
        device = self.tokens.device
        chosen, lengths = (torch.from_numpy(array).to(device) for array in (rows, self.lengths[rows]))
        longest = -(-int(self.lengths[rows].max()) // _MULTIPLE) * _MULTIPLE
        offsets = torch.arange(longest, device=device)
        mask = offsets < lengths[:, None]
        inputs = self.tokens[torch.where(mask, self.starts[chosen][:, None] + offsets, 0)]
        return Batch(torch.where(mask, inputs, 0).long(), mask.long(), None, lengths)

    def batches(self, tokens: int, *, seed: int, epoch: int) -> list[Array]:
        """Return the indices of all passages in batches of ``tokens`` tokens with padding, in random order."""
        random = np.random.default_rng((seed, epoch))
        lengths = -(-self.lengths // _MULTIPLE) * _MULTIPLE
        order = random.permutation(len(lengths))
        bucket = max(1, int(_BATCHES_PER_BUCKET * tokens / lengths.mean()))
        found: list[Array] = []
        for first in range(0, len(order), bucket):
            rows = order[first : first + bucket]
            rows = rows[np.argsort(-lengths[rows], kind="stable")]
            while len(rows):
                count = max(1, tokens // int(lengths[rows[0]]))
                found.append(rows[:count])
                rows = rows[count:]
        return [found[index] for index in random.permutation(len(found))]


def read_passages(path: Path, tokenizer: Tokenizer, max_length: int, without: Iterable[str] = ()) -> Passages:
    """Read a text file, one passage a line, ``.xz`` or plain.

    Args:
        max_length: most tokens of a passage, special ones included; the rest is cut.
        without: sentences that must not be among the passages, such as those of an evaluation: lines that hold one of
            them are left out.

    Raises:
        DataError: it cannot be read, or has no passage.
    """
    fix = "Give a file of plain text, UTF-8, one passage a line."
    try:
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise DataError(f"{path}", given=Raw(error), expected="a text file", fix=fix) from None
    evaluated = {plain(text) for text in without}
    lines = [line for line in lines if line and plain(line) not in evaluated]
    if not lines:
        raise DataError(f"{path}", given=Raw("no passage"), expected="one at least", fix=fix)
    return tokenised(tokenizer, lines, max_length)


def tokenised(tokenizer: Tokenizer, texts: Sequence[str], max_length: int) -> Passages:
    """Return texts as passages of at most ``max_length`` tokens."""
    tokenizer.enable_truncation(max_length)
    encodings = tokenizer.encode_batch_fast(list(texts))
    tokenizer.no_truncation()
    lengths = np.array([len(encoding.ids) for encoding in encodings], np.int64)
    tokens = np.concatenate([np.asarray(encoding.ids, np.int32) for encoding in encodings])
    starts = np.concatenate([[0], lengths.cumsum()[:-1]])
    return Passages(torch.from_numpy(tokens), torch.from_numpy(starts), lengths)


def plain(text: str) -> str:
    """Return a text without case, accents, punctuation and spaces, by which equal sentences are recognised."""
    return "".join(char for char in unicodedata.normalize("NFKD", text.casefold()) if char.isalnum())
