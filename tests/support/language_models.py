"""Language models that are small enough for tests, and the tokenizer for them."""

from __future__ import annotations

from functools import cache

import torch

from export.language.backbone import new_gpt2
from export.language.formats import Example
from export.language.tokenizer import TextTokenizer, train_bpe, train_characters

EXAMPLES = tuple(Example(f"What is {a} plus {b}?", "", str(a + b)) for a in range(6) for b in range(6))


@cache
def bpe() -> TextTokenizer:
    return train_bpe((one.text_before + one.completion for one in EXAMPLES), 300)


@cache
def characters() -> TextTokenizer:
    """Return a tokenizer of which every token is a whole character."""
    return train_characters(one.text_before + one.completion for one in EXAMPLES)


def tiny_gpt2(seed=0, positions=64, tokenizer=None):
    """Return a random model for :func:`bpe`, whose logits differ enough that no rounding changes their order."""
    torch.manual_seed(seed)
    tokenizer = tokenizer or bpe()
    model = new_gpt2(tokenizer.size, 16, 2, 2, positions, end=tokenizer.end).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter *= 10
    return model


def tiny_llama(positions=64):
    """Return a random model with rotary embeddings and RMS normalisations, for :func:`bpe`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=bpe().size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=positions, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()
