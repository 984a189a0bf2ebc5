"""Language models of GGUF files."""

import json
import sys

import numpy as np
import pytest
import torch

from edge.errors import UsageError
from export.cli.language import language
from export.errors import CheckpointError
from export.generate.model import Base, identity_of, save_backbone
from tests.support.language_models import bpe
from tests.support.task_data import invoke

gguf = pytest.importorskip("gguf")

#: Names in a GGUF of what a layer has.
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=bpe().size, **shape, **heads)).eval()


def write_gguf(path, model, tokenizer, without=""):
    """Write a Llama as llama.cpp does: all matrices of whole blocks of 32 inputs in Q8_0, the rest in FP32."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    content = json.loads(tokenizer.tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(content["vocab"], key=content["vocab"].get))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(content["vocab"]))
    writer.add_token_merges([" ".join(pair) for pair in content["merges"]])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id, writer.add_pad_token_id):
        add(tokenizer.end)
    writer.add_add_bos_token(False)
    for name, parameter in model.state_dict().items():
        plain, values = name.removesuffix(".weight"), parameter.numpy()
        if plain in OTHERS:
            written = OTHERS[plain]
        else:
            _, _, layer, part = plain.split(".", 3)
            written = f"blk.{layer}.{LAYER[part]}"
        if written == without:
            continue
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(written[6:])
        if heads:  # llama.cpp rotates pairs of neighbours
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{written}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{written}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_becomes_a_model_that_says_what_it_was(tmp_path):
    original, path = tiny_llama(), tmp_path / "tiny.gguf"
    write_gguf(path, original, bpe())
    printed = json.loads(invoke(language, "dequantize", path, "--out", tmp_path / "model", "--json"))
    base = Base(tmp_path / "model")
    assert base.identity.dequantized_from == printed["dequantized_from"]
    assert printed["dequantized_from"].startswith("tiny.gguf with F32, Q8_0, SHA-256 ")
    assert "dequantized from tiny.gguf" in base.identity.described
    text = "Question: What is 3 plus 4?\nAnswer:"
    assert base.tokenizer.prompt("What is 3 plus 4?") == bpe().prompt("What is 3 plus 4?")
    assert (base.tokenizer.end, base.tokenizer.begin) == (bpe().end, [])
    assert base.tokenizer.decode(base.tokenizer.prompt("What is 3 plus 4?")) == text
    found = base.model.state_dict()
    for name, right in original.state_dict().items():
        rows = right.numpy() if right.dim() == 2 else right.numpy()[None]
        step = np.abs(rows).max() / 127  # of a block of Q8_0, at most
        np.testing.assert_allclose(found[name].numpy(), right, atol=0.51 * step, err_msg=name)
    assert not torch.equal(found["model.embed_tokens.weight"], original.state_dict()["model.embed_tokens.weight"])
    save_backbone(base.model, base.tokenizer, tmp_path / "derived")
    assert identity_of(tmp_path / "derived").dequantized_from == printed["dequantized_from"]


@pytest.mark.parametrize(
    ("write", "given"),
    [
        (lambda path: path.write_bytes(b"no model"), ".*"),
        (
            lambda path: write_gguf(path, tiny_llama(), bpe(), without="blk.1.ffn_up"),
            "no weights .*1.mlp.up_proj.weight",
        ),
    ],
    ids=["no GGUF", "missing weights"],
)
def test_a_broken_file_is_refused(write, given, tmp_path):
    write(tmp_path / "broken.gguf")
    message = (
        f"broken.gguf: got {given}, expected a GGUF that transformers reads. Give a file of a model of gpt2, .* as"
    )
    with pytest.raises(CheckpointError, match=message):
        invoke(language, "dequantize", tmp_path / "broken.gguf", "--out", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_gguf_has_to_be_installed(tmp_path, monkeypatch):
    (tmp_path / "tiny.gguf").touch()
    monkeypatch.setitem(sys.modules, "gguf", None)  # imports of it fail
    with pytest.raises(UsageError, match=r"gguf: .* Install it with pip install 'fewheads\[language"):
        invoke(language, "dequantize", tmp_path / "tiny.gguf", "--out", tmp_path / "model")
