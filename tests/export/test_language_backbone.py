import sys

import pytest
import safetensors.torch
import torch

from edge.errors import UsageError
from export.errors import CheckpointError
from export.language.backbone import load_backbone, new_gpt2, save_backbone
from export.language.decoding import Decoding, complete
from export.language.tokenizer import TextTokenizer
from tests.support.language_models import EXAMPLES, bpe, tiny_gpt2

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "intermediate_size": 16, "max_position_embeddings": 64, "head_dim": 8}
PROMPTS = [example.prompt for example in EXAMPLES[:4]] + ["2"]


def test_gpt2s_size_and_layers():
    with torch.device("meta"):
        model = new_gpt2(50257, 768, 12, 12, 1024, end=50256)
    assert model.num_parameters() == 124_439_808  # the published model's, its last layer being its embeddings


def test_a_saved_model_is_loaded_here_and_by_transformers(tmp_path):
    model = tiny_gpt2()
    save_backbone(model, bpe(), tmp_path / "model", {"metrics.json": b"{}"})
    ids = torch.tensor([bpe().encode(EXAMPLES[0]).ids.tolist()])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for loaded in (load_backbone(tmp_path / "model"), theirs):
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        assert not loaded.training
    text = EXAMPLES[0].text_before
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer(text).input_ids == TextTokenizer.load(tmp_path / "model").prompt(EXAMPLES[0].prompt)
    assert tokenizer.eos_token_id == theirs.generation_config.eos_token_id == bpe().end
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tmp_path / "model" / "metrics.json").read_bytes() == b"{}"


@pytest.mark.parametrize("kind", ["Llama", "Gemma", "Gemma2", "Gemma3Text"])
def test_models_of_other_kinds_write_texts(kind, tmp_path):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, eos_token_id=bpe().end, pad_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config)
    save_backbone(model, bpe(), tmp_path / "model")
    loaded, tokenizer = load_backbone(tmp_path / "model"), TextTokenizer.load(tmp_path / "model")
    assert complete(loaded, tokenizer, PROMPTS, 3) == [greedy(model.eval(), prompt, 3) for prompt in PROMPTS]


def broken(change):
    """Return a function that changes a saved model's weights."""

    def apply(directory):
        path = directory / "model.safetensors"
        weights = safetensors.torch.load_file(path)
        change(weights)
        safetensors.torch.save_file(weights, path, {"format": "pt"})

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda place: (place / "config.json").unlink(), "got No such file or directory, expected the configuration"),
        (lambda place: (place / "config.json").write_text("{"), "expected JSON"),
        (
            lambda place: (place / "config.json").write_text('{"model_type": "bert"}'),
            "got 'bert', expected one of gpt2",
        ),
        (lambda place: (place / "model.safetensors").unlink(), "got no weights, expected model.safetensors or"),
        (lambda place: (place / "model.safetensors").write_bytes(b"{}"), "expected a model that transformers loads"),
        (broken(lambda weights: weights.pop("transformer.wpe.weight")), "got no weights transformer.wpe.weight"),
        (broken(lambda weights: weights["transformer.wpe.weight"].fill_(torch.nan)), "NaN or Inf in transformer.wpe"),
        (
            broken(lambda weights: weights.update({"transformer.wpe.weight": torch.zeros(3, 16)})),
            "expected a model that transformers loads",
        ),
    ],
)
def test_a_broken_directory_is_refused(change, message, tmp_path):
    save_backbone(tiny_gpt2(), bpe(), tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(CheckpointError) as caught:
        load_backbone(tmp_path / "model")
    assert message in str(caught.value)
    assert "Give a model of gpt2, gemma, gemma2, gemma3_text, llama as transformers saves it" in str(caught.value)


def test_transformers_has_to_be_installed(tmp_path, monkeypatch):
    save_backbone(tiny_gpt2(), bpe(), tmp_path / "model")
    monkeypatch.setitem(sys.modules, "transformers", None)  # imports of it fail
    with pytest.raises(UsageError, match=r"expected an importable package. Install it with pip install 'fewheads\["):
        load_backbone(tmp_path / "model")


def greedy(model, prompt, room):
    """Return a greedy completion, token by token, each from the whole text before it."""
    ids = torch.tensor([bpe().prompt(prompt)])
    start = ids.shape[1]
    with torch.inference_mode():
        for _ in range(room):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return bpe().decode(ids[0, start:])


def test_batches_of_prompts_are_completed_like_single_ones():
    model = tiny_gpt2()
    expected = [greedy(model, prompt, 12) for prompt in PROMPTS]
    assert len(set(expected)) > 1
    sizes = []
    assert complete(model, bpe(), PROMPTS, 12, batch_size=3, on_batch=sizes.append) == expected
    assert sizes == [3, 2]


def test_a_completion_ends_with_the_text():
    model = tiny_gpt2()
    written = bpe().prompt(PROMPTS[0])
    text = TextTokenizer(bpe().tokenizer, int(model(torch.tensor([written])).logits[0, -1].argmax()))
    assert complete(model, text, PROMPTS[:1], 12) == [""]
    assert complete(model, bpe(), PROMPTS[:1], 12) != [""]


def test_what_is_drawn_depends_on_the_seed():
    model = tiny_gpt2(seed=1)
    before = torch.get_rng_state()
    drawn = [complete(model, bpe(), PROMPTS, 8, Decoding(temperature=2.0, seed=seed)) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert drawn[0] == drawn[1] != drawn[2]
    assert complete(model, bpe(), PROMPTS, 8, Decoding(temperature=2.0, top_k=1)) == complete(model, bpe(), PROMPTS, 8)


def test_beams_find_a_text_that_is_at_least_as_likely():
    model = tiny_gpt2(seed=2)

    def likelihood(prompt, text):
        before = bpe().prompt(prompt)
        ids = torch.tensor([before + bpe().tokenizer.encode(text, add_special_tokens=False).ids])
        logs = model(ids).logits.log_softmax(-1)[0, :-1]
        return logs.gather(1, ids[0, 1:, None])[len(before) - 1 :].sum().item()

    texts = [complete(model, bpe(), ["2"], 4, Decoding(beams=beams))[0] for beams in (1, 8)]
    assert texts[0] != texts[1]
    assert likelihood("2", texts[1]) > likelihood("2", texts[0])


def test_a_prompt_without_room_has_an_empty_completion():
    model = tiny_gpt2(positions=len(bpe().prompt("2")) + 2)
    completions = complete(model, bpe(), ["2", "What is 2 plus 2, and no more?"], 10)
    assert completions[0] == greedy(model, "2", 2)
    assert completions[1] == ""
