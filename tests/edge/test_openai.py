"""OpenAI's stock client on models that generate text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from edge.server import Ready
from tests.support.letters_model import NAME, PROMPT, TEXT, completion, continued

openai = pytest.importorskip("openai", reason="it asks with OpenAI's client")


def stock(ready: Ready) -> Any:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{ready.http_port}/v1", api_key="none", max_retries=0, timeout=20)


@pytest.fixture
def client(writer: Ready) -> Iterator[Any]:
    with stock(writer) as client:
        yield client


def test_stock_client_gets_texts(client: Any) -> None:
    answer = client.completions.create(**completion(max_tokens=6, user="somebody", n=1, echo=False))
    (choice,) = answer.choices
    assert (choice.text, choice.index, choice.finish_reason, choice.logprobs) == (TEXT, 0, "length", None)
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", NAME, "cmpl-")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 6, 9)
    # One choice for each prompt; the sum of "yb", 27, ends the text at once.
    answer = client.completions.create(
        **completion(prompt=["yb", PROMPT, "de"], stop=[TEXT[2:4], "none"], max_tokens=5)
    )
    choices = [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices]
    assert choices == [(0, "", "stop"), (1, TEXT[:2], "stop"), (2, continued("de", 5), "length")]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 1 + 4 + 5)
    assert client.completions.create(**completion(stop=TEXT[1])).choices[0].text == TEXT[0]


def test_defaults_are_those_of_openai(client: Any) -> None:
    def text(**fields: Any) -> str:
        return str(client.completions.create(model=NAME, prompt=PROMPT, **fields).choices[0].text)

    assert text(temperature=0) == text(top_p=1e-6) == text(extra_body={"top_k": 1}) == continued(PROMPT, 16)
    drawn = text(seed=5)
    assert drawn == text(seed=5, temperature=1)
    assert not continued(PROMPT, 16).startswith(drawn)


def test_several_choices_for_a_prompt(client: Any) -> None:
    def texts(**fields: Any) -> list[str]:
        answer = client.completions.create(**completion(temperature=1, max_tokens=5, prompt=[PROMPT, "de"], **fields))
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        assert answer.usage.prompt_tokens == 5  # those of a prompt once
        return [choice.text for choice in answer.choices]

    drawn = texts(n=3, best_of=3, seed=5)
    assert len(drawn) == len(set(drawn)) == 6
    assert [drawn[place::3] for place in range(3)] == [texts(seed=5 + choice) for choice in range(3)]


def test_prompts_as_ids_of_tokens(client: Any) -> None:
    ids = {"abc": [1, 2, 3], "de": [4, 5]}
    for prompt, texts in ((ids["abc"], ["abc"]), ([ids["de"]], ["de"]), ([ids["de"], "abc"], ["de", "abc"])):
        answer = client.completions.create(**completion(prompt=prompt, max_tokens=9))
        assert [choice.text for choice in answer.choices] == [continued(text, 9) for text in texts]
        assert answer.usage.prompt_tokens == sum(map(len, texts))


def test_stock_client_streams(client: Any) -> None:
    prompts = [PROMPT, "de"]
    options = {"include_usage": True}
    texts, reasons = ["", ""], []
    for chunk in client.completions.create(
        **completion(prompt=prompts, max_tokens=9), stream=True, stream_options=options
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert texts == [continued(prompt, 9) for prompt in prompts]
    assert (reasons, chunk.choices) == (["length", "length"], [])
    assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (5, 18)


def test_stock_client_lists_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    model = client.models.retrieve(NAME)
    assert (model.id, model.object, model.owned_by, model.created > 1e9) == (NAME, "model", "fewheads", True)
