"""Texts that a language model writes, in batches, through ``generate`` of the package transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from export.data.tokens import sorted_batches
from export.generate.model import positions_of
from export.generate.tokenizer import TextTokenizer
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
    written = complete_tokens(model, tokens, max_tokens, decoding, batch_size=batch_size, on_batch=on_batch)
    ends = end_tokens(model)
    return [tokenizer.decode([token for token in ids if token not in ends]) for ids in written]


def complete_tokens(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    max_tokens: int,
    decoding: Decoding = GREEDY,
    *,
    batch_size: int = 32,
    on_batch: Callable[[int], None] = lambda size: None,
) -> list[list[int]]:
    """Return the tokens that follow each prompt, as :func:`complete`, with the one that ends the text."""
    completions: list[list[int]] = [[] for _ in prompts]
    ends = set(end_tokens(model))
    lengths = np.array([len(prompt) for prompt in prompts])
    rooms = np.clip(positions_of(model) - lengths, 0, max_tokens)
    # The rows of a batch stop together. So they have the same room, and none is cut because of a longer one.
    groups = [np.flatnonzero(rooms == room) for room in np.unique(rooms)]
    batches = [group[batch] for group in groups for batch in sorted_batches(lengths[group], batch_size)]
    for number, batch in enumerate(batches):
        if room := int(rooms[batch[0]]):
            written = _written(model, [prompts[row] for row in batch], decoding, room, number)
            for row, ids in zip(batch, written, strict=True):
                length = next((count for count, token in enumerate(ids, 1) if token in ends), room)
                completions[row] = ids[:length]
        on_batch(len(batch))
    return completions


def end_tokens(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the tokens any of which ends a text, as the model's generation_config.json or config.json has them."""
    configs = (model.generation_config, model.config)
    of_generation, of_model = (getattr(config, "eos_token_id", None) for config in configs)
    ends = of_model if of_generation is None else of_generation
    return () if ends is None else tuple(int(token) for token in np.atleast_1d(ends))


def generate(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, max_tokens: int, decoding: Decoding = GREEDY, **outputs: bool
) -> Any:
    """Return what ``generate`` of transformers makes of ids and mask, [B, T] each, with this decoding and no more.

    Of the model's own generation_config.json only the end tokens count: a penalty of repetitions there, for example,
    would change what is greedy. transformers takes from it whatever an argument leaves open, so another one takes its
    place during the call.

    Args:
        outputs: further results, as ``GenerationConfig`` names them.
    """
    from transformers import GenerationConfig

    ends = list(end_tokens(model))
    options: dict[str, Any] = {"do_sample": decoding.temperature > 0, "num_beams": decoding.beams, **outputs}
    options |= {"eos_token_id": ends or None, "pad_token_id": ends[0] if ends else 0}
    if decoding.beams > 1:
        options["length_penalty"] = 0.0  # the likeliest sequence; transformers divides by the length otherwise
    if decoding.temperature > 0:
        options |= {"temperature": decoding.temperature, "top_k": decoding.top_k, "top_p": 1.0}
    untyped: Any = model
    configuration = untyped.generation_config
    untyped.generation_config = GenerationConfig(max_new_tokens=max_tokens, **options)  # type: ignore[no-untyped-call]
    try:
        return untyped.generate(input_ids=ids, attention_mask=mask)
    finally:
        untyped.generation_config = configuration


def _written(
    model: PreTrainedModel, prompts: Sequence[list[int]], decoding: Decoding, room: int, number: int
) -> list[list[int]]:
    """Return the tokens that batch ``number`` writes, in rows of one length: with padding behind an end."""
    device = model_device(model)
    ids, mask = (
        pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_side="left")
        for rows in (prompts, [[1] * len(prompt) for prompt in prompts])
    )
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.inference_mode():
        # Of a larger seed, torch's generator on the CPU ignores all but 32 bits.
        torch.manual_seed(int(np.random.SeedSequence((decoding.seed, number)).generate_state(1)[0]))
        texts: Tensor = generate(model, ids.to(device), mask.to(device), room, decoding)
    written: list[list[int]] = texts[:, ids.shape[1] :].tolist()
    return written
