"""Each type of language model that the documents name: by commands from its directory to the texts of transformers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from edge.bundles.bundle import Bundle
from edge.launch import running_server
from export.estimate.model import kernels
from export.generate.backbone import ARCHITECTURES, save_backbone
from tests.support.commands import mistake, shown
from tests.support.language_models import characters, tiny_of
from tests.support.marks import with_rtx, with_transformers

pytestmark = with_transformers

PROMPTS = ("What is 3 plus 4?", "is", "1 2 3")
TOKENS, ROWS = 12, 8
#: Names a directory.
REAL = "FEWHEADS_LANGUAGE_MODEL"
REAL_PROMPTS = (
    "The capital of France is", "Once upon a time there was a", "Question: What is 3 + 4?\nAnswer:", "In the year 2000",
    "The three primary colours are", "Water boils at a temperature of", "def fibonacci(n):\n", "1, 2, 3, 4,",
    "The largest planet in the solar system is", "My favourite food is", "To make a cup of tea, first",
    "The opposite of hot is", "Shakespeare wrote", "A triangle has", "Dear Sir or Madam,\n", "The quick brown fox",
    "Photosynthesis is the process by which", "Berlin ist die Hauptstadt von", "Il était une fois", "日本の首都は",
)  # fmt: skip


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that exports a model of a type once, and returns its bundle; its directory is beside it."""
    place = tmp_path_factory.mktemp("types")

    @cache
    def export(name: str) -> Path:
        save_backbone(tiny_of(name, characters()), characters(), place / name)
        tokenizer = Tokenizer.from_file(str(place / name / "tokenizer.json"))
        tokenizer.enable_padding(length=64)  # as of a training, which transformers ignores
        tokenizer.enable_truncation(4)
        tokenizer.save(str(place / name / "tokenizer.json"))
        table = shown("language", "export", place / name, "--name", name, "--repository", place)
        assert all(f"x1.{file}.onnx" in table for file in ("onnxruntime.fp32", "tensorrt.fp16"))
        return place / f"{name}-1"

    return export


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_type_is_exported(name: str, exported: Callable[[str], Path]) -> None:
    assert exported(name).is_dir()


#: Kernels of two layers, for a prompt and for a step. Before keys and values were joined, GPT-2 had 49 and 43, Gemma 2
#: 51 and 43, Gemma 3 58 and 46, and the others 50 and 42.
KERNELS = {
    "gpt2": (22, 17), "gemma": (27, 26), "gemma2": (29, 28), "gemma3_text": (36, 31), "llama": (27, 26),
    "mistral": (27, 26), "qwen2": (27, 26),
}  # fmt: skip


@with_rtx
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_attention_of_each_type_is_one_kernel_in_prompts_and_in_steps(
    name: str, exported: Callable[[str], Path]
) -> None:
    bundle = Bundle.open(exported(name))
    (artifact,) = [one for one in bundle.manifest.tiers[0].artifacts if one.runtime == "tensorrt"]
    tensors = bundle.manifest.tensors(artifact)
    counts = []
    for profile in (tensors.profile, *tensors.more_profiles):
        found = kernels(bundle.read(artifact.file), profile)
        assert found is not None
        # _gemm_mha_v2, or for a single query _gemv_mha_v1
        assert len([one for one in found if "_mha_v" in one]) == 2
        counts.append(len(found))
    assert all(count <= most for count, most in zip(counts, KERNELS[name], strict=True))


def test_a_name_that_is_wrong_or_taken_is_refused_before_the_work(
    exported: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = exported("llama").parent
    monkeypatch.setitem(sys.modules, "export.generate.bundle", None)  # whose import would fail
    for name, message in (("Llama", "--name: got 'Llama', expected lower-case"), ("llama", "got an existing bundle")):
        assert message in mistake("language", "export", place / "llama", "--name", name, "--repository", place)


def compare(name: str, directory: Path, prompts: Sequence[str], tokenizer: Any, port: int) -> None:
    """Check that a server continues prompts as transformers does with the model of a directory."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    options = ("--max-tokens", TOKENS, "--url", f"127.0.0.1:{port}", "--timeout", 600, "--json")
    texts = []
    for place in range(0, len(prompts), ROWS):  # of different lengths, together
        found = json.loads(shown("infer", name, *prompts[place : place + ROWS], *options))["outputs"]
        texts += [text for (text,) in found["text"]]
    for prompt, text in zip(prompts, texts, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        made = model.generate(input_ids=ids, do_sample=False, max_new_tokens=TOKENS)
        whole = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        assert text == whole.rstrip("\ufffd"), (name, prompt)  # the last character may be cut


def test_each_type_writes_the_texts_of_transformers(exported: Callable[[str], Path], tmp_path: Path) -> None:
    import transformers

    bundles = [exported(name) for name in ARCHITECTURES]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=characters().tokenizer)
    with running_server(bundles, target="onnxruntime", cache=tmp_path) as ready:
        for name, bundle in zip(ARCHITECTURES, bundles, strict=True):
            compare(name, bundle.parent / name, PROMPTS, tokenizer, ready.grpc_port)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_real_model_writes_the_texts_of_transformers(tmp_path: Path) -> None:
    import transformers

    place = os.environ.get(REAL)
    if place is None:
        pytest.skip(f"set {REAL} to a directory with a language model as transformers saves it")
    shown("language", "export", place, "--name", "real", "--repository", tmp_path)
    shown("build", tmp_path / "real-1", "--target", "onnxruntime", "--cache", tmp_path / "cache")
    with running_server([tmp_path / "real-1"], target="onnxruntime", cache=tmp_path / "cache") as ready:
        compare("real", Path(place), REAL_PROMPTS, transformers.AutoTokenizer.from_pretrained(place), ready.grpc_port)
