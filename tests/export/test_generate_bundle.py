"""Language models as bundles: the decoder's graph beside transformers, whole texts, and heads in requests."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import grpc
import msgspec
import numpy as np
import onnx
import pytest
import torch
import transformers

from edge.bundles.bundle import Bundle, write_bundle
from edge.bundles.rules import check
from edge.client.connection import open_stub
from edge.errors import BundleError, UsageError
from edge.launch import serving
from edge.programs.backward_head import head_of as open_head
from edge.runtimes.tensorrt.build import compile_onnx
from edge.runtimes.tensorrt.profiles import described
from export.bundle.exportable import export_bundle
from export.bundle.exported import FULL
from export.estimate.devices import DEFAULT_BOARD
from export.estimate.estimate import estimate_bundle
from export.estimate.parts import predict_file
from export.generate.bundle import LanguageModel, decoders_of
from export.generate.decoder import TOKENS, DecoderGraph
from export.generate.golden import LEAST_LEAD, Greedy, clearest, golden_of_texts
from export.generate.model import BaseIdentity, identity_of
from export.papers.backward.bundle import TrainedHead
from export.papers.backward.head import BackwardHead, HeadConfig
from export.training.provenance import provenance
from tests.support.language_models import TYPES, characters, tiny_of
from tests.support.letters_model import BYTES, LETTERS, text_request, tokenizer_of
from tests.support.marks import with_rtx

PROMPTS = ("abc", "hello", "world", "xyz", "foo", "bar")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    place = tmp_path_factory.mktemp("models") / "letters"
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
    config = transformers.GPT2Config(vocab_size=len(LETTERS), bos_token_id=0, eos_token_id=0, **sizes)
    transformers.GPT2LMHeadModel(config).save_pretrained(place)
    (place / "tokenizer.json").write_bytes(tokenizer_of({}).to_str().encode())
    return place


@pytest.fixture(scope="module")
def repository(directory, tmp_path_factory):
    place = tmp_path_factory.mktemp("repository")
    export_bundle(LanguageModel(directory, "letters", PROMPTS, int8=True), place)
    for number, strength in enumerate((0.0, 40.0)):
        head = head_of(directory, strength)
        made, identity = provenance(trainer="a test", data="none", seed=0), identity_of(directory)
        export_bundle(TrainedHead(head, place / "letters-1", f"head-{number}", identity, made), place)
    return place


def head_of(directory, strength):
    torch.manual_seed(1)
    embeddings = transformers.GPT2LMHeadModel.from_pretrained(directory).transformer.wte.weight.detach()
    head = BackwardHead(HeadConfig(vocabulary=27, width=32, dims=8, heads=2, layers=2), embeddings)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith("alpha"):
                parameter.fill_(strength)
    return head


@contextmanager
def stub_of(repository):
    with (
        serving(repository, target="onnxruntime") as ready,
        grpc.insecure_channel(f"127.0.0.1:{ready.grpc_port}") as channel,
    ):
        yield open_stub(channel)


def ask(stub, prompt, max_tokens=10, **parameters):
    response = stub.ModelInfer(text_request(prompt, max_tokens=max_tokens, **parameters))
    return bytes(response.raw_output_contents[0][4:]).decode()


@pytest.mark.parametrize("kind", TYPES)
def test_the_graph_of_each_kind_computes_the_logits_of_the_library(kind):
    model = tiny_of(kind, characters())
    ids = torch.randint(0, characters().size, (2, 9))
    with torch.no_grad():
        expected = model(ids).logits  # before the attention is replaced
        graph = DecoderGraph(model)
        for blocks in ([graph], graph.blocks(1)):
            past = [[torch.zeros(2, heads, 1, of.width) for _, _, heads in of.caches()] for of in blocks]
            for start, end in ((0, 5), (5, 9)):
                lengths, last = (torch.full((2, 1), number) for number in (start, end - start - 1))
                passed = ids[:, start:end]
                for number, block in enumerate(blocks):
                    columns = (lengths, last)[: len(block.columns)]
                    passed, *past[number] = block(passed, *columns, *past[number])
                torch.testing.assert_close(passed, expected[:, end - 1], rtol=1e-4, atol=1e-5)


def test_texts_of_100_prompts_are_those_of_the_library(directory, repository):
    model = transformers.GPT2LMHeadModel.from_pretrained(directory).eval()
    random = np.random.default_rng(0)
    prompts = [random.integers(1, 27, length) for length in random.integers(1, 30, 100)]
    with stub_of(repository) as stub, ThreadPoolExecutor(8) as pool:  # they join as others leave
        asked = partial(ask, stub, max_tokens=20)
        texts = pool.map(asked, ["".join(LETTERS[token] for token in prompt) for prompt in prompts])
        for prompt, text in zip(prompts, texts, strict=True):
            made = model.generate(torch.from_numpy(prompt)[None], do_sample=False, max_new_tokens=20, pad_token_id=0)
            assert text == "".join(LETTERS[token] for token in made[0, len(prompt) :].tolist() if token)


def test_the_file_for_tensorrt_has_its_cache_in_fp16_and_profiles_for_prompts_and_tokens(repository):
    bundle = Bundle.open(repository / "letters-1")
    host, device = bundle.manifest.tiers[0].artifacts
    assert [spec.datatype for spec in host.inputs or ()] == ["INT64"] * 3 + ["FP32"] * 4
    assert [spec.datatype for spec in device.inputs or ()] == ["INT64"] * 3 + ["FP16"] * 4
    assert [spec.datatype for spec in device.outputs or ()] == ["FP32"] + ["FP16"] * 4
    tokens = [profiles[TOKENS] for profiles in bundle.manifest.tensors(device).profiles]
    assert [(one.min, one.max) for one in tokens] == [((1, 2), (8, 63)), ((1, 1), (8, 1))]
    tier = bundle.manifest.tiers[0]
    outputs = tuple(msgspec.structs.replace(spec, datatype="FP32") for spec in device.outputs or ())
    mixed = msgspec.structs.replace(tier, artifacts=(host, msgspec.structs.replace(device, outputs=outputs)))
    manifest = msgspec.structs.replace(bundle.manifest, tiers=(mixed,))
    with pytest.raises(BundleError, match=r"input 'past\.0\.key': got .*'FP16'.*, expected FP32 or FP16 .*as 'new"):
        check(manifest, "manifest")


@with_rtx
def test_a_head_compiles(repository):
    bundle = Bundle.open(repository / "head-1-1")
    (artifact,) = bundle.manifest.tiers[0].artifacts
    data, profile = bundle.read(artifact.file), bundle.manifest.tensors(artifact).profile
    report = compile_onnx(data, profile, flavor="tensorrt_rtx", compute_capability="SM86", subject="a head").report
    assert report.notes == ()
    assert report.profiles == (described(profile),)


def test_int8_leaves_a_product_in_fp32_whose_input_one_unit_dominates(directory):
    model = transformers.GPT2LMHeadModel.from_pretrained(directory).eval()
    layer = model.transformer.h[1].mlp
    with torch.no_grad():  # no output shows the unit, but it takes the levels of all others
        layer.c_fc.bias[0] = 1000.0
        layer.c_proj.weight[0] *= 1e-6
    tokens = np.random.default_rng(0).integers(1, 27, (4, 12)).tolist()
    file = decoders_of([DecoderGraph(model)], len(LETTERS), 64, tokens).models[f"{FULL}-int8.onnxruntime.int8.onnx"]
    graph = onnx.load_from_string(file.data).graph
    weights = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    assert sum(node.op_type == "MatMulInteger" for node in graph.node) == 7  # of four in each of two layers
    kept = [weights[node.input[1]] for node in graph.node if node.op_type == "MatMul" and node.input[1] in weights]
    assert kept == [(128, 32)]


def test_prompts_tokens_and_heads_have_predicted_latencies(repository, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)  # so that nobody counts the kernels of an engine
    full, int8 = Bundle.open(repository / "letters-1").manifest.tiers
    assert int8.latencies == ()  # it has no file for TensorRT
    found = {(one.part, one.rows, one.tokens): one.milliseconds for one in full.latencies}
    decode = "decode, 64 cached"  # the cache's places of a model with 64 positions
    assert list(found) == [("prefill", 1, 32), ("prefill", 8, 32), (decode, 1, 1), (decode, 8, 1)]
    assert found[decode, 1, 1] < found["prefill", 1, 32] < found["prefill", 8, 32]
    (head,) = Bundle.open(repository / "head-1-1").manifest.tiers
    rows = [(of.part, of.rows, of.tokens, of.times_faster) for of in head.latencies]
    assert rows == [("head", 1, None, 1), ("head", 8, None, 1)]
    for name, tier in (("letters-1", full), ("head-1-1", head)):
        rows = estimate_bundle(repository / name, *DEFAULT_BOARD, batches=(1, 8)).rows
        assert [row.milliseconds for row in rows] == [one.milliseconds for one in tier.latencies]
    graph = Bundle.open(repository / "head-1-1").read("head.onnx")
    arrays = np.load(repository / "head-1-1" / "tensors.npz")
    shapes = {name: arrays[f"0/{name}"].shape for name in ("keys", "values", "temperatures")}
    layer = predict_file(graph, {"logits": (1, 27), "alpha": (1, 1), **shapes}, DEFAULT_BOARD.mode, "head")
    assert head.latencies[0].milliseconds == pytest.approx(2 * layer.milliseconds)


def test_golden_texts_are_clear_and_of_one_length(directory, repository):
    goldens = Bundle.open(repository / "letters-1").goldens
    model = transformers.GPT2LMHeadModel.from_pretrained(directory).eval()
    full, int8 = goldens[FULL], goldens[f"{FULL}-int8"]
    assert (full.rows > 1, int8.rows) == (True, 1)
    for ids, mask, (generated,) in zip(full.inputs["ids"], full.inputs["mask"], full.outputs["generated"], strict=True):
        prompt = torch.from_numpy(ids[: mask.sum()])[None]
        made = model.generate(
            prompt, do_sample=False, max_new_tokens=int(generated), output_logits=True, return_dict_in_generate=True,
            pad_token_id=0,
        )  # fmt: skip
        best = torch.cat(made.logits).topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) >= LEAST_LEAD


@pytest.mark.parametrize(
    ("leads", "rows", "expected"),
    [
        ([[1, 1, 1, 0, 1], [1, 1, 0, 1, 1], [1, 0, 1, 1, 1]], 3, [2, 2]),
        ([[1, 1, 1, 0, 1], [1, 1, 0, 1, 1], [1, 1, 1, 1, 1]], 1, [5]),
        ([[1, 1, 1, 1], [1], [0, 1, 1, 1], [1, 1]], 4, [4, 2, 1]),  # some have ended before
        ([[0.1, 0.09], [0.09, 0.1]], 2, [1]),
    ],
)
def test_the_clearest_texts_have_most_tokens(leads, rows, expected):
    texts = [Greedy(str(row), [1], [*range(len(row))], row) for row in leads]
    assert [len(text.tokens) for text in clearest(texts, rows, "full")] == expected
    unclear = [text._replace(leads=[0.0] * len(text.tokens)) for text in texts]
    with pytest.raises(UsageError, match=r"tier 'full': got prompts .*expected one whose next token leads the second"):
        clearest(unclear, rows, "full")


def test_a_golden_text_ends_before_a_character_that_is_cut(repository):
    manifest, tokenizer = Bundle.open(repository / "letters-1").manifest, tokenizer_of(BYTES)
    texts = [Greedy("a", [1], [LETTERS.index(letter) for letter in "aflx"[:length]], []) for length in (4, 3)]
    golden = golden_of_texts(texts, tokenizer, manifest.program, manifest.preprocess, tokenizer.to_str().encode())
    assert [text.decode() for text in golden.outputs["text"][:, 0]] == ["a丹", "a"]


def test_requests_choose_heads_that_move_the_logits_of_their_base(directory, repository):
    with stub_of(repository) as stub:
        for prompt in PROMPTS:
            plain = ask(stub, prompt)
            assert ask(stub, prompt, head="head-0") == ask(stub, prompt, head="head-1", alpha=0.0) == plain
            assert ask(stub, prompt, head="head-1") == greedy(directory, prompt, 10) != plain


def greedy(directory, prompt, tokens):
    """Return the text of the model and the head in torch, without a cache."""
    model = transformers.GPT2LMHeadModel.from_pretrained(directory).eval()
    head = head_of(directory, 40.0)
    ids = [LETTERS.index(letter) for letter in prompt]
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(head(model(torch.tensor([ids])).logits[0, -1:])[0].argmax()))
            if not ids[-1]:
                break
    return "".join(LETTERS[token] for token in ids[len(prompt) :] if token)


def test_heads_of_other_weights_and_broken_heads_are_refused(directory, repository, tmp_path):
    letters = Bundle.open(repository / "letters-1")
    bundle = Bundle.open(repository / "head-1-1")
    base = msgspec.structs.replace(bundle.manifest.program.base, sha256="0" * 64)
    program = msgspec.structs.replace(bundle.manifest.program, base=base)
    files = {name: bundle.read(name) for name in bundle.manifest.files}
    manifest = msgspec.structs.replace(bundle.manifest, name="other", program=program)
    (tmp_path / "r").mkdir()
    write_bundle(tmp_path / "r" / "other", manifest, files)
    (tmp_path / "r" / "letters").symlink_to(repository / "letters-1")
    with stub_of(tmp_path / "r") as stub, pytest.raises(grpc.RpcError) as refused:
        stub.ModelInfer(text_request("abc", head="other"))
    assert "'other', a head of letters 1, expected a head of letters 1 with the same" in refused.value.details()
    made, identity = provenance(trainer="a test", data="none", seed=0), BaseIdentity("another", "0" * 64)
    model = identity_of(directory)
    record = msgspec.structs.replace(letters.manifest.provenance, trainer=f"distilled from a, {model.sha256}, on b")
    files = {name: letters.read(name) for name in letters.manifest.files}
    write_bundle(tmp_path / "student", msgspec.structs.replace(letters.manifest, provenance=record), files)
    for backbone, of, message in (
        (repository / "letters-1", identity, r"SHA-256 \w+, expected a bundle of another, SHA-256 000"),
        (tmp_path / "student", model, r"got distilled from a, \w+, on b, expected a bundle of letters, SHA-256"),
        (repository / "head-1-1", identity, "got no such model, expected a bundle that generates text"),
    ):
        with pytest.raises(UsageError, match=message):
            export_bundle(TrainedHead(head_of(directory, 1.0), backbone, "x", of, made), tmp_path)
    broken = msgspec.structs.replace(bundle.manifest.program, layers=3)
    with pytest.raises(BundleError, match="the arrays of 3 layers"):
        open_head(bundle, broken, {})
