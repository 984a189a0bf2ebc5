"""Golden texts: greedy continuations of prompts that are clear enough for machines that round otherwise.

The logit of each of their tokens exceeds the second largest by :data:`LEAST_LEAD` or more. FP16, or another CPU, moves
logits a little, and where two are nearly equal it would choose another token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from edge.bundles.golden import Golden
from edge.bundles.preprocess import TokenizerPreprocessor
from edge.bundles.programs import GenerateProgram
from edge.bundles.steps import TokenizerPreprocess
from edge.errors import Raw, UsageError
from edge.programs.generate import Generate
from edge.programs.generated_text import Pieces
from export.generate.decoding import generate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Logits.
LEAST_LEAD = 0.1


class Greedy(NamedTuple):
    """The likeliest tokens after a prompt, and by how much the logit of each exceeds the second largest."""

    prompt: str
    ids: list[int]
    tokens: list[int]
    leads: list[float]

    @property
    def clear(self) -> int:
        """The number of tokens before the first one that is not clear; of all, if each is."""
        return next((number for number, lead in enumerate(self.leads) if lead < LEAST_LEAD), len(self.tokens))


def greedy_of_model(model: Any, tokenizer: Tokenizer, prompts: Sequence[str], program: GenerateProgram) -> list[Greedy]:
    """Return what transformers itself generates after the prompts that leave room for a text.

    Raises:
        UsageError: no prompt leaves room.
    """
    texts = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt).ids
        room = program.positions - len(ids)
        if room < 1:
            continue
        row, limit = torch.tensor([ids]), min(program.max_tokens, room)
        made = generate(model, row, torch.ones_like(row), limit, output_logits=True, return_dict_in_generate=True)
        best = torch.cat(made.logits).topk(2, dim=1).values
        leads = (best[:, 0] - best[:, 1]).tolist()
        texts.append(Greedy(prompt, ids, made.sequences[0, len(ids) :].tolist(), leads))
    if not texts:
        expected = f"some of less than {program.positions} tokens"
        given = Raw("prompts that leave no room for a text")
        fix = "Give --data with shorter ones, or --positions."
        raise UsageError("golden prompts", given=given, expected=expected, fix=fix)
    return texts


def greedy_of_file(writer: Generate, tier: str, references: Sequence[Greedy]) -> list[Greedy]:
    """Return what the file of a tier makes of each prompt alone, with as many tokens as the reference at most."""
    texts = []
    decoder = writer.decoder(tier)
    for reference in references:
        logits = decoder.add(np.array([reference.ids]), np.array([len(reference.ids)]))
        tokens, leads = [], []
        while True:
            second, best = np.partition(logits[0], -2)[-2:].tolist()
            tokens.append(int(logits[0].argmax()))
            leads.append(best - second)
            if len(tokens) == len(reference.tokens) or tokens[-1] in writer.config.end_tokens:
                break
            logits = decoder.step(np.array(tokens[-1:]))
        decoder.keep(0, [])
        texts.append(Greedy(reference.prompt, reference.ids, tokens, leads))
    writer.give_back(tier, decoder)
    return texts


def clearest(texts: Sequence[Greedy], rows: int, tier: str) -> list[Greedy]:
    """Return so many texts at most, cut at one length; they have as many tokens together as can be clear.

    Texts that end before that length stay as they are.

    Raises:
        UsageError: no text has a clear first token.
    """

    def cut(length: int) -> list[Greedy]:
        clear = [text for text in texts if text.clear >= min(length, len(text.tokens))]
        shorter = [text._replace(tokens=text.tokens[:length], leads=text.leads[:length]) for text in clear]
        return sorted(shorter, key=lambda text: -len(text.tokens))[:rows]

    longest = max(len(text.tokens) for text in texts)
    chosen = max(map(cut, range(1, longest + 1)), key=lambda cuts: sum(len(text.tokens) for text in cuts))
    if not chosen:
        given = Raw(f"prompts after which no token leads by {LEAST_LEAD}")
        expected = f"one whose next token leads the second choice by {LEAST_LEAD} logits"
        fix = "Give --data with other prompts; a model without training may have none."
        raise UsageError(f"golden prompts of the tier {tier!r}", given=given, expected=expected, fix=fix)
    return chosen


def golden_of_texts(
    texts: Sequence[Greedy],
    tokenizer: Tokenizer,
    program: GenerateProgram,
    step: TokenizerPreprocess,
    definition: bytes,
) -> Golden:
    """Return the golden set of a bundle whose preprocessing is ``step``, with the tokenizer of that definition."""
    raw = np.array([[text.prompt.encode()] for text in texts], np.object_)
    inputs = TokenizerPreprocessor(step, definition, step.file, cut=False)(raw)
    written = []
    for text in texts:
        pieces = Pieces(tokenizer)  # without the character in which the text may have been cut
        shown = "".join(pieces.add(token) for token in text.tokens if token not in program.end_tokens)
        written.append([shown.encode()])
    generated = np.array([[len(text.tokens)] for text in texts], np.int32)
    return Golden(
        inputs, {program.text: np.array(written), program.generated: generated}, {step.input: raw.astype(np.bytes_)}
    )
