"""Each type of language model that the documents name: by commands from its directory to the texts of transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from edge.launch import running_server
from export.language.backbone import ARCHITECTURES, save_backbone
from tests.support.commands import mistake, shown
from tests.support.language_models import characters, tiny_of
from tests.support.marks import with_transformers

pytestmark = with_transformers

PROMPTS = ("What is 3 plus 4?", "is", "1 2 3")
TOKENS = 12


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that exports a model of a type once, and returns its bundle; its directory is beside it."""
    place = tmp_path_factory.mktemp("types")

    @cache
    def export(name: str) -> Path:
        layers = 2 if name in ("gemma2", "gemma3_text") else 1  # of these types, they alternate
        save_backbone(tiny_of(name, characters(), layers=layers), characters(), place / name)
        table = shown("language", "export", place / name, "--name", name, "--repository", place)
        assert all(f"x1.{file}.onnx" in table for file in ("onnxruntime.fp32", "tensorrt.fp16"))
        return place / f"{name}-1"

    return export


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_type_is_exported(name: str, exported: Callable[[str], Path]) -> None:
    assert exported(name).is_dir()


def test_a_name_that_is_wrong_or_taken_is_refused_before_the_work(
    exported: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = exported("llama").parent
    monkeypatch.setitem(sys.modules, "export.language.bundle", None)  # whose import would fail
    for name, message in (("Llama", "--name: got 'Llama', expected lower-case"), ("llama", "got an existing bundle")):
        assert message in mistake("language", "export", place / "llama", "--name", name, "--repository", place)


def test_each_type_writes_the_texts_of_transformers(exported: Callable[[str], Path], tmp_path: Path) -> None:
    import transformers

    bundles, tokenizer = [exported(name) for name in ARCHITECTURES], characters().tokenizer
    with running_server(bundles, target="onnxruntime", cache=tmp_path) as ready:
        for name, bundle in zip(ARCHITECTURES, bundles, strict=True):
            asked = ("infer", name, *PROMPTS, "--max-tokens", TOKENS, "--url", f"127.0.0.1:{ready.grpc_port}", "--json")
            found = [text for (text,) in json.loads(shown(*asked))["outputs"]["text"]]
            model = transformers.AutoModelForCausalLM.from_pretrained(bundle.parent / name).eval()
            for prompt, text in zip(PROMPTS, found, strict=True):
                ids = tokenizer.encode(prompt).ids
                made = model.generate(input_ids=torch.tensor([ids]), do_sample=False, max_new_tokens=TOKENS)
                assert text == tokenizer.decode(made[0, len(ids) :].tolist()), (name, prompt)
