"""Texts that a language model writes, in batches, through ``generate`` of the package transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from export.language.backbone import positions_of
from export.language.tokenizer import TextTokenizer
from export.tasks.tokens import sorted_batches
from export.training.device import model_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Decoding(msgspec.Struct, frozen=True):
    """How the next token is chosen.

    Attributes:
        temperature: of the distribution that tokens are drawn from; 0 takes the most likely one.
        top_k: draws from so many tokens; 0 is all.
        beams: sequences that are kept, of which the most likely one is taken; 1 is no beam search.
        seed: of what is drawn.
    """

    temperature: float = 0.0
    top_k: int = 0
    beams: int = 1
    seed: int = 0


GREEDY = Decoding()


def complete(
    model: PreTrainedModel,
    tokenizer: TextTokenizer,
    prompts: Sequence[str],
    max_tokens: int,
    decoding: Decoding = GREEDY,
    *,
    batch_size: int = 32,
    on_batch: Callable[[int], None] = lambda size: None,
) -> list[str]:
    """Return the completion of each question, up to the end of the text or ``max_tokens``.

    A completion ends where the model has no more positions; a question without room for one gets an empty one. What is
    drawn depends on the seed and the batch: the same questions in batches of the same size get the same completions.

    Args:
        on_batch: is called with the number of questions of each finished batch.
    """
    tokens = [tokenizer.prompt(prompt) for prompt in prompts]
    written = complete_tokens(
        model, tokens, tokenizer.end, max_tokens, decoding, batch_size=batch_size, on_batch=on_batch
    )
    return [tokenizer.decode(ids) for ids in written]


def complete_tokens(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    end: int,
    max_tokens: int,
    decoding: Decoding = GREEDY,
    *,
    batch_size: int = 32,
    on_batch: Callable[[int], None] = lambda size: None,
) -> list[list[int]]:
    """Return the tokens that follow each prompt, as :func:`complete`; after an ``end`` come only further ends."""
    completions: list[list[int]] = [[] for _ in prompts]
    positions = positions_of(model)
    lengths = np.array([len(one) for one in prompts])
    for number, batch in enumerate(sorted_batches(lengths, batch_size)):
        fitting = [place for place in batch if lengths[place] < positions]
        if fitting:
            room = min(max_tokens, positions - max(lengths[fitting]))
            written = _generate(model, [prompts[place] for place in fitting], end, decoding, int(room), number)
            for place, ids in zip(fitting, written, strict=True):
                completions[place] = ids
        on_batch(len(batch))
    return completions


def _generate(
    model: PreTrainedModel, prompts: Sequence[list[int]], end: int, decoding: Decoding, room: int, number: int
) -> list[list[int]]:
    device = model_device(model)
    ids, mask = _left_padded(prompts, end)
    options: dict[str, Any] = {"do_sample": decoding.temperature > 0, "num_beams": decoding.beams}
    if decoding.beams > 1:
        options["length_penalty"] = 0.0  # the likeliest sequence; transformers divides by the length otherwise
    if decoding.temperature > 0:
        options |= {"temperature": decoding.temperature, "top_k": decoding.top_k, "top_p": 1.0}
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.inference_mode():
        # Of a larger seed, torch's generator on the CPU ignores all but 32 bits.
        torch.manual_seed(int(np.random.SeedSequence((decoding.seed, number)).generate_state(1)[0]))
        generate: Any = model.generate
        found: Tensor = generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=room,
            eos_token_id=end,
            pad_token_id=end,
            **options,
        )
    written: list[list[int]] = found[:, ids.shape[1] :].tolist()
    return written


def _left_padded(prompts: Sequence[list[int]], padding: int) -> tuple[Tensor, Tensor]:
    """Return ids and mask, [B, T] each, that end with the last token of each prompt."""
    length = max(map(len, prompts))
    ids, mask = np.full((len(prompts), length), padding), np.zeros((len(prompts), length), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :], mask[row, length - len(prompt) :] = prompt, 1
    return torch.from_numpy(ids), torch.from_numpy(mask)
