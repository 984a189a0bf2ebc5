"""Each type of language model that the documents name: by commands from its directory to the texts of transformers."""

import json
import os
import sys
from functools import cache, partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from edge.bundles.bundle import Bundle
from edge.bundles.manifest import Profile
from edge.launch import running_server
from edge.runtimes.tensorrt.build import compile_onnx
from edge.runtimes.tensorrt.profiles import described
from export.estimate.model import kernels
from export.generate.decoder import TOKENS
from export.generate.model import ARCHITECTURES, save_backbone
from tests.support.commands import mistake, shown
from tests.support.language_models import characters, tiny_of
from tests.support.marks import with_rtx, with_transformers

pytestmark = with_transformers

PROMPTS = ("What is 3 plus 4?", "is", "1 2 3")
MOST_TOKENS, ROWS = 12, 8
#: Names a directory.
REAL = "FEWHEADS_LANGUAGE_MODEL"
REAL_PROMPTS = (
    "The capital of France is", "Question: What is 3 + 4?\nAnswer:", "def fibonacci(n):\n", "1, 2, 3, 4,",
    "My favourite food is", "Dear Sir or Madam,\n", "Berlin ist die Hauptstadt von", "日本の首都は",
)  # fmt: skip


compiled = partial(compile_onnx, flavor="tensorrt_rtx", compute_capability="SM86", subject="a language model")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a function that exports a model of a type once, and returns its bundle; its directory is beside it."""
    place = tmp_path_factory.mktemp("types")

    @cache
    def export(name):
        save_backbone(tiny_of(name, characters(), layers=1), characters(), place / name)
        tokenizer = Tokenizer.from_file(str(place / name / "tokenizer.json"))
        tokenizer.enable_padding(length=64)  # as of a training, which transformers ignores
        tokenizer.enable_truncation(4)
        tokenizer.save(str(place / name / "tokenizer.json"))
        table = shown("language", "export", place / name, "--name", name, "--repository", place)
        assert all(f"x1.{file}.onnx" in table for file in ("onnxruntime.fp32", "tensorrt.fp16"))
        return place / f"{name}-1"

    return export


#: Kernels of one layer, for a prompt and for a step. Before keys and values were joined, two had about twice as many.
KERNELS = {
    "gpt2": (14, 11), "gemma": (15, 14), "gemma2": (17, 16), "gemma3_text": (21, 18), "llama": (15, 14),
    "mistral": (15, 14), "qwen2": (15, 14),
}  # fmt: skip


@with_rtx
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_attention_of_each_type_is_one_kernel_in_prompts_and_in_steps(name, exported):
    bundle = Bundle.open(exported(name))
    (artifact,) = [one for one in bundle.manifest.tiers[0].artifacts if one.runtime == "tensorrt"]
    tensors = bundle.manifest.tensors(artifact)
    counts = []
    for profile in (tensors.profile, *tensors.more_profiles):
        found = kernels(bundle.read(artifact.file), profile)
        # _gemm_mha_v2, or for a single query _gemv_mha_v1
        assert len([one for one in found if "_mha_v" in one]) == 1
        counts.append(len(found))
    assert all(count <= most for count, most in zip(counts, KERNELS[name], strict=True))


@with_rtx
def test_a_decoder_compiles_for_all_rows_tokens_and_places(exported):
    bundle = Bundle.open(exported("llama"))
    (artifact,) = [one for one in bundle.manifest.tiers[0].artifacts if one.runtime == "tensorrt"]
    profile, step_profile = bundle.manifest.tensors(artifact).profiles
    report = compiled(bundle.read(artifact.file), profile, more_profiles=[step_profile]).report
    assert report.notes == ()
    assert report.profiles == (described(profile), described(step_profile))
    shapes = [profiles[TOKENS] for profiles in (profile, step_profile)]
    assert shapes == [Profile(min=(1, 2), opt=(1, 63), max=(ROWS, 63)), Profile(min=(1, 1), opt=(1, 1), max=(ROWS, 1))]
    # The runner checks tokens. Lengths index the table of positions only together with the places of new tokens.
    assert report.index_limits == {TOKENS: characters().size}
    assert report.attention == "1 block, fused"


def test_a_name_that_is_wrong_or_taken_is_refused_before_the_work(exported, monkeypatch):
    place = exported("llama").parent
    monkeypatch.setitem(sys.modules, "export.generate.bundle", None)  # whose import would fail
    for name, message in (("Llama", "--name: got 'Llama', expected lower-case"), ("llama", "got an existing bundle")):
        assert message in mistake("language", "export", place / "llama", "--name", name, "--repository", place)


def compare(name, directory, prompts, tokenizer, port):
    """Check that a server continues prompts as transformers does with the model of a directory."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    options = ("--max-tokens", MOST_TOKENS, "--url", f"127.0.0.1:{port}", "--timeout", 600, "--json")
    texts = []
    for place in range(0, len(prompts), ROWS):  # of different lengths, together
        found = json.loads(shown("infer", name, *prompts[place : place + ROWS], *options))["outputs"]
        texts += [text for (text,) in found["text"]]
    for prompt, text in zip(prompts, texts, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        made = model.generate(input_ids=ids, do_sample=False, max_new_tokens=MOST_TOKENS)
        whole = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        assert text == whole.rstrip("\ufffd"), (name, prompt)  # the last character may be cut


def test_each_type_writes_the_texts_of_transformers(exported, tmp_path):
    import transformers

    bundles = [exported(name) for name in ARCHITECTURES]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=characters().tokenizer)
    with running_server(bundles, target="onnxruntime", cache=tmp_path) as ready:
        for name, bundle in zip(ARCHITECTURES, bundles, strict=True):
            compare(name, bundle.parent / name, PROMPTS, tokenizer, ready.grpc_port)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_real_model_writes_the_texts_of_transformers(tmp_path):
    import transformers

    place = os.environ.get(REAL)
    if place is None:
        pytest.skip(f"set {REAL} to a directory with a language model as transformers saves it")
    shown("language", "export", place, "--name", "real", "--repository", tmp_path)
    shown("build", tmp_path / "real-1", "--target", "onnxruntime", "--cache", tmp_path / "cache")
    with running_server([tmp_path / "real-1"], target="onnxruntime", cache=tmp_path / "cache") as ready:
        compare("real", Path(place), REAL_PROMPTS, transformers.AutoTokenizer.from_pretrained(place), ready.grpc_port)
