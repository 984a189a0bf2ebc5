import sys

import pytest
import safetensors.torch
import torch

from edge.bundles.programs import GenerateProgram
from edge.errors import UsageError
from export.errors import CheckpointError
from export.generate.backbone import load_backbone, new_gpt2, save_backbone
from export.generate.decoder import DecoderGraph
from export.generate.decoding import Decoding, complete, end_tokens, generate
from export.generate.golden_texts import greedy_of_model
from export.generate.tokenizer import TextTokenizer
from tests.support.language_models import EXAMPLES, bpe, tiny_gpt2

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
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


KINDS = ["Llama", "Gemma", "Gemma2", "Gemma3Text", "Mistral", "Qwen2"]


def of_kind(kind, **changes):
    """Return a random model of a kind, whose weights are large enough that its texts depend on the prompt."""
    torch.manual_seed(0)
    options = {
        **SIZES,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "eos_token_id": bpe().end,
        "pad_token_id": None,
        **changes,
    }
    config = getattr(transformers, f"{kind}Config")(**options)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_other_kinds_write_texts(kind, tmp_path):
    model = of_kind(kind)
    save_backbone(model, bpe(), tmp_path / "model")
    loaded, tokenizer = load_backbone(tmp_path / "model"), TextTokenizer.load(tmp_path / "model")
    expected = [greedy(model, prompt, 3) for prompt in PROMPTS]
    assert complete(loaded, tokenizer, PROMPTS, 3) == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize(("kind", "changes"), [("Mistral", {"sliding_window": 3}), ("Qwen2", {})])
def test_the_decoders_graph_writes_what_the_library_does(kind, changes):
    model = of_kind(kind, **changes)
    prompt, tokens = torch.tensor([bpe().prompt(PROMPTS[0])]), 8
    expected = generate(model, prompt, torch.ones_like(prompt), tokens)  # before the attention is replaced
    graph = DecoderGraph(model)
    cache = [torch.zeros(1, heads, 0, graph.width) for _, _, heads in graph.caches()]
    new, written = prompt, prompt
    with torch.inference_mode():
        for _ in range(expected.shape[1] - prompt.shape[1]):
            places, last = torch.tensor([[cache[0].shape[2]]]), torch.tensor([[new.shape[1] - 1]])
            logits, *added = graph(new, places, last, *cache)
            cache = [torch.cat(pair, dim=2) for pair in zip(cache, added, strict=True)]
            new = logits.argmax(-1, keepdim=True)
            written = torch.cat([written, new], dim=1)
    assert torch.equal(written, expected)
    assert len(set(written[0, prompt.shape[1] :].tolist())) > 1


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
    assert "Give a model of gpt2, gemma, gemma2, gemma3_text, llama, mistral, qwen2 as transformers saves it" in str(
        caught.value
    )


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


def test_any_of_the_models_end_tokens_ends_a_completion():
    model = tiny_gpt2()
    ids = torch.tensor([bpe().prompt(PROMPTS[0])])
    first, second = generate(model, ids, torch.ones_like(ids), 2)[0, ids.shape[1] :].tolist()
    assert first != second
    for ends, expected in (([bpe().end, first], ""), ([bpe().end, second], bpe().decode([first]))):
        model.generation_config.eos_token_id = ends
        assert end_tokens(model) == tuple(ends)
        assert complete(model, bpe(), PROMPTS[:2], 12)[0] == expected
    model.generation_config.eos_token_id = None
    assert end_tokens(model) == (bpe().end,)


def program_of(ends):
    names = {name: name for name in ("tokens", "lengths", "last", "logits", "text", "generated")}
    return GenerateProgram(**names, cache=(), positions=64, max_tokens=12, end_tokens=ends)


@pytest.mark.parametrize("changes", [{"repetition_penalty": 1.5}, {"suppress_tokens": [*range(100)]}])
def test_settings_of_the_model_change_no_decoding(changes):
    model = tiny_gpt2()
    expected = complete(model, bpe(), PROMPTS, 12)
    tokenizer, program = bpe().tokenizer, program_of(end_tokens(model))
    golden = greedy_of_model(model, tokenizer, PROMPTS, program)
    model.generation_config.update(**changes)
    assert complete(model, bpe(), PROMPTS, 12) == expected
    assert greedy_of_model(model, tokenizer, PROMPTS, program) == golden
    assert {name: getattr(model.generation_config, name) for name in changes} == changes


def test_what_is_drawn_depends_on_the_seed():
    model = tiny_gpt2(seed=1)
    before = torch.get_rng_state()
    drawn = [complete(model, bpe(), PROMPTS, 8, Decoding(temperature=2.0, seed=seed)) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert drawn[0] == drawn[1] != drawn[2]
    alike = complete(model, bpe(), ["2"] * 4, 8, Decoding(temperature=2.0), batch_size=1)
    assert len(set(alike)) > 1  # each batch has its own numbers
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


def test_beams_find_the_likeliest_text_whatever_its_length():
    model = tiny_gpt2(seed=2)
    ids = torch.tensor([bpe().prompt("2")])
    model.generation_config.eos_token_id = [*range(0, bpe().size, 2)]
    by_penalty = [
        model.generate(ids, max_new_tokens=6, num_beams=4, do_sample=False, length_penalty=penalty, pad_token_id=0)
        for penalty in (0.0, 1.0)
    ]
    assert by_penalty[0].tolist() != by_penalty[1].tolist()
    assert torch.equal(generate(model, ids, torch.ones_like(ids), 6, Decoding(beams=4)), by_penalty[0])


def test_a_completion_does_not_depend_on_its_neighbours():
    longer = "2" * 12
    model = tiny_gpt2(positions=len(bpe().prompt(longer)) + 3)
    expected = [greedy(model, "2", 10), greedy(model, longer, 3)]
    assert complete(model, bpe(), ["2", longer], 10) == expected
    assert len(expected[0]) > len(expected[1])


def test_a_prompt_without_room_has_an_empty_completion():
    model = tiny_gpt2(positions=len(bpe().prompt("2")) + 2)
    completions = complete(model, bpe(), ["2", "What is 2 plus 2, and no more?"], 10)
    assert completions[0] == greedy(model, "2", 2)
    assert completions[1] == ""
