"""Language models in blocks of layers: the logits and texts of the whole, engines of their own, and what is refused."""

import json
from contextlib import closing

import numpy as np
import onnx
import pytest

from edge.bundles.bundle import Bundle
from edge.errors import UsageError
from edge.programs.tier_program import load_tier
from edge.runtimes.tensorrt.build import compile_onnx
from export.generate import bundle as export_module
from export.generate.bundle import LanguageModel
from export.generate.model import load_backbone, save_backbone
from export.generate.sublayers import attention_of, feed_forward_of, layers_of, left_parameters
from tests.support.commands import mistake, ran, shown
from tests.support.language_models import characters, tiny_of
from tests.support.marks import with_rtx, with_transformers

pytestmark = with_transformers

PROMPTS = ("What is 3 plus 4?", "is", "1 2 3")
LAYERS, PER_BLOCK = 5, 2
BLOCKS = (range(2), range(2, 4), range(4, 5))


@pytest.fixture(scope="module", params=["gpt2", "gemma3_text"])
def exported(request, tmp_path_factory):
    """Return the directory of a model, and its bundles, whole and in blocks; a head and a neuron are removed."""
    place = tmp_path_factory.mktemp(request.param)
    model = tiny_of(request.param, characters(), layers=LAYERS)
    config = model.config.get_text_config()
    attention_of(layers_of(model)[3], config).remove([1])
    feed_forward_of(layers_of(model)[4]).remove([0])
    save_backbone(model, characters(), place / "model")
    for name, layers in (("whole", LAYERS), ("blocks", PER_BLOCK)):
        options = ("--name", name, "--repository", place, "--int8", "--layers-per-block", layers, "--json")
        (made,) = json.loads(shown("language", "export", place / "model", *options))
        assert len(made["files"]) == 3 * -(-LAYERS // layers)  # FP32, FP16 and INT8
    return place / "model", Bundle.open(place / "whole-1"), Bundle.open(place / "blocks-1")


def test_blocks_have_the_logits_and_texts_of_the_whole(exported, tmp_path):
    _, *bundles = exported
    random = np.random.default_rng(0)
    size = characters().size
    for tier in ("x1", "x1-int8"):
        whole, blocks = (load_tier(bundle, "onnxruntime", tmp_path, tier=tier) for bundle in bundles)
        with closing(whole), closing(blocks):
            assert [*blocks.files] == ["backbone-1", "backbone-2", "backbone-3"]
            decoders = [of._program.decoder(tier) for of in (whole, blocks)]

            def check(work, decoders=decoders):
                expected, found = (work(decoder).copy() for decoder in decoders)
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)

            for lengths in ([9, 3, 20], [33]):  # the second makes the cache of the others grow
                prompts = random.integers(0, size, (len(lengths), max(lengths)))
                check(lambda decoder, prompts=prompts, lengths=lengths: decoder.add(prompts, np.array(lengths)))
                for _ in range(3):
                    tokens = random.integers(0, size, 3 if len(lengths) == 3 else 4)
                    check(lambda decoder, tokens=tokens: decoder.step(tokens))
            for decoder in decoders:
                decoder.keep(2, [(3, 0)])
            check(lambda decoder: decoder.step(np.array([1, 2])))
            golden = bundles[0].goldens[tier]
            for program in (whole, blocks):
                outputs = program.compute(golden.inputs).outputs
                begun = zip(outputs["text"][:, 0], golden.outputs["text"][:, 0], strict=True)
                assert all(text.startswith(of.rstrip(b"\0")) for text, of in begun)
    assert bundles[0].golden.outputs["text"].tolist() == bundles[1].golden.outputs["text"].tolist()


def test_each_block_has_its_layers_alone_and_files_are_as_large_as_counted(exported):
    directory, whole, blocks = exported
    assert whole.manifest.roles == ("backbone",)
    model = load_backbone(directory)
    for bundle, ranges in ((whole, [range(LAYERS)]), (blocks, BLOCKS)):
        for role, layers in zip(bundle.manifest.roles, ranges, strict=True):
            artifact = bundle.artifact("onnxruntime", role=role)
            caches = [spec.name for spec in artifact.inputs if spec.name.startswith("past.")]
            assert caches == [f"past.{layer}.{kind}" for layer in layers for kind in ("key", "value")]
            graph = onnx.load_from_string(bundle.read(artifact.file)).graph
            numbers = sum(np.prod(weight.dims, dtype=int) for weight in graph.initializer)
            assert numbers == pytest.approx(left_parameters(model, layers), rel=0.05)


@with_rtx
def test_each_block_compiles_with_its_attention_fused(exported):
    _, _, bundle = exported
    for role, layers in zip(bundle.manifest.roles, BLOCKS, strict=True):
        artifact = bundle.artifact("tensorrt", role=role)
        profile, *more = bundle.manifest.tensors(artifact).profiles
        product = compile_onnx(
            bundle.read(artifact.file), profile, more_profiles=more, flavor="tensorrt_rtx", compute_capability="SM86",
            subject=artifact.file,
        )  # fmt: skip
        assert b"_gemm_mha_v2" in product.data
        assert (product.report.attention_blocks, product.report.all_fused) == (len(layers), True)


def test_blocks_have_predicted_latencies_of_all_blocks(exported):
    _, whole, blocks = exported
    predicted = [
        {(one.part, one.rows): one.milliseconds for one in of.manifest.tiers[0].latencies} for of in (whole, blocks)
    ]
    assert predicted[0].keys() == predicted[1].keys()
    # The same work, with a few more kernels at most.
    assert all(0.999 < predicted[1][key] / predicted[0][key] < 1.3 for key in predicted[0])


def test_commands_tell_blocks(exported):
    _, _, bundle = exported
    assert "text token by token, in 3 blocks that run in turn" in shown("info", bundle.path)


def test_wrong_numbers_of_layers_are_refused_before_the_work(tmp_path, monkeypatch):
    save_backbone(tiny_of("gpt2", characters(), layers=33), characters(), tmp_path / "deep")
    given = ("language", "export", tmp_path / "deep", "--name", "deep", "--repository", tmp_path)
    assert mistake(*given, "--layers-per-block", 1).startswith(
        "--layers-per-block: got 1, expected 2 or more, for at most 32 blocks of 33 layers. Raise it, or leave it out"
    )
    assert "0 is not in the range" in ran(*given, "--layers-per-block", 0).stderr
    for layers in (0, -1):
        with pytest.raises(UsageError, match=f"got {layers}, expected 2 or more"):
            LanguageModel(tmp_path / "deep", "deep", PROMPTS, layers_per_block=layers).contents(None)
    model = load_backbone(tmp_path / "deep")
    monkeypatch.setattr(export_module, "_MOST_ONNX_BYTES", 4 * left_parameters(model) - 1)
    assert "in a file. Reduce it, lower --layers-per-block, or" in mistake(*given)
    monkeypatch.setattr(export_module, "_MOST_ONNX_BYTES", 4 * left_parameters(model, range(2)))
    monkeypatch.setattr(export_module, "greedy_of_model", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # it goes on to the work
        LanguageModel(tmp_path / "deep", "deep", PROMPTS, layers_per_block=2).contents(None)
