"""Language models that are small enough for tests, and the tokenizer for them."""

from functools import cache

import torch

from export.generate.formats import Example
from export.generate.model import new_gpt2, save_backbone
from export.generate.tokenizer import train_bpe, train_characters

EXAMPLES = tuple(Example(f"What is {a} plus {b}?", "", str(a + b)) for a in range(6) for b in range(6))

#: Files of a tokenizer that this project does not write itself.
CHAT = {
    "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>",'
    b' "bos_token": "<|endoftext|>", "pad_token": "!", "model_max_length": 64}',
    "chat_template.jinja": b"{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "additional_chat_templates/short.jinja": b"{{ messages[-1].content }}",
}


@cache
def bpe():
    return train_bpe((one.text_before + one.completion for one in EXAMPLES), 300)


@cache
def characters():
    """Return a tokenizer of which every token is a whole character."""
    return train_characters(one.text_before + one.completion for one in EXAMPLES)


def tiny_gpt2(seed=0, positions=64, tokenizer=None, dim=16, heads=2, layers=2):
    """Return a random model for :func:`bpe`, whose logits differ enough that no rounding changes their order."""
    torch.manual_seed(seed)
    tokenizer = tokenizer or bpe()
    model = new_gpt2(tokenizer.size, dim, layers, heads, positions, end=tokenizer.end).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter *= 10
    return model


def save_with_chat(model, tokenizer, directory):
    """Write a directory whose tokenizer has chat templates, further special tokens and a compact tokenizer.json."""
    save_backbone(model, tokenizer, directory, {**CHAT, "tokenizer.json": tokenizer.tokenizer.to_str().encode()})


def check_tokenizer_is_kept(source, directory):
    """Check that a directory has the files of the tokenizer of another, and that transformers reads them."""
    from transformers import AutoTokenizer

    for name in ("tokenizer.json", *CHAT):
        assert (directory / name).read_bytes() == (source / name).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "2"}], tokenize=False) == "user: 2\n"
    assert tokenizer.pad_token == "!"


#: Fields of a tiny model of each type but GPT-2's. Weights are large, so that no rounding changes a text.
_CAPS = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 20.0}
TYPES = {
    "llama": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": 3},
    "qwen2": {"hidden_size": 64},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 3, **_CAPS},
    "gemma3_text": {"head_dim": 16, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
}


def tiny_of(model_type, tokenizer, positions=64, layers=2):
    """Return a random model of a type for a tokenizer, whose heads of 16 features share keys and values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if model_type == "gpt2":
        return tiny_gpt2(positions=positions, tokenizer=tokenizer, dim=64, heads=4, layers=layers)
    torch.manual_seed(0)
    fields = {"hidden_size": 32, **TYPES[model_type]}
    if "layer_types" in fields:
        fields["layer_types"] = (fields["layer_types"] * layers)[:layers]
    config = AutoConfig.for_model(
        model_type, vocab_size=tokenizer.size, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=positions, initializer_range=0.3,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.end), **fields,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def tiny_llama():
    """Return a random model with rotary embeddings and RMS normalisations, for :func:`bpe`."""
    return tiny_of("llama", bpe())
