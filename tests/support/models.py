"""Tiny models and bundles for the tests, without training and without torch.

python -m tests.support.models      writes tests/data/bundles/calculator-oracle-1
"""

import shutil
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edge.bundles.bundle import write_bundle
from edge.bundles.expression import MAX_TERMS, TOKENS, evaluate, tokenize
from edge.bundles.golden import Golden
from edge.bundles.manifest import Artifact, Manifest, Profile, Provenance, Tier, Tolerance
from edge.bundles.steps import ExpressionPreprocess
from edge.datatypes import TensorSpec

DATA = Path(__file__).parent.parent / "data"
ORACLE_BUNDLE = DATA / "bundles" / "calculator-oracle-1"

ORACLE, VERSIONED = "calculator-oracle", "versioned"

#: The oracle is exact for whole operands up to this size: float32 holds their sums with it without rounding.
LARGEST_OPERAND = 1024.0
MAX_BATCH_SIZE = 64
EXPRESSIONS = ("7", "3 + 4", "3 - 4", "-5 - -6", "1 + 2 - 3 + 4", "1024 - -1024", "0 + 0", "1-2+3-4+5-6+7-8")

ATTENTION_HEADS = 2
ATTENTION_SEQUENCE = 16


def oracle_weights():
    """Weights (15, 30), (30,) and (30, 1) that compute expressions exactly: ``relu(x @ first + bias) @ second``.

    An operand x behind the operator code o contributes ``relu(x + Mo - M) - relu(-x + Mo - M) - relu(x - Mo) +
    relu(-x - Mo)`` with M = 1024: x for o = 1, -x for o = 0, and nothing for the padding x = o = 0.5.
    """
    first = np.zeros((TOKENS, 2 + 4 * (MAX_TERMS - 1)), np.float32)
    bias = np.zeros(first.shape[1], np.float32)
    second = np.zeros((first.shape[1], 1), np.float32)
    first[0, :2] = 1, -1
    second[:2, 0] = 1, -1
    for term in range(1, MAX_TERMS):
        units = slice(4 * term - 2, 4 * term + 2)
        first[2 * term, units] = 1, -1, 1, -1
        first[2 * term - 1, units] = np.array([1, 1, -1, -1]) * LARGEST_OPERAND
        bias[units] = np.array([-1, -1, 0, 0]) * LARGEST_OPERAND
        second[units, 0] = 1, -1, -1, 1
    return first, bias, second


def oracle_onnx():
    """The oracle as ONNX: x [batch, 15] float32 to value [batch, 1] float32."""
    layers = {"first_layer": ("Gemm", "x first bias", "before"), "relu": ("Relu", "before", "hidden")}
    layers["second_layer"] = ("MatMul", "hidden second", "value")
    graph = helper.make_graph(
        [helper.make_node(kind, reads.split(), [gives], name) for name, (kind, reads, gives) in layers.items()],
        "oracle",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", TOKENS])],
        [helper.make_tensor_value_info("value", TensorProto.FLOAT, ["batch", 1])],
        map(numpy_helper.from_array, oracle_weights(), ("first", "bias", "second")),
    )
    return serialized(graph)


def attention_weights(head_dim):
    """Random float16 projections of the shape (heads * head_dim, heads * head_dim)."""
    width = ATTENTION_HEADS * head_dim
    generator = np.random.default_rng(0)
    return {name: (generator.normal(size=(width, width)) / width**0.5).astype(np.float16) for name in ("q", "k", "v")}


def attention_onnx(head_dim, datatype="FP16"):
    """Self-attention of two heads: x [batch, 16, 2 * head_dim] to y of the same shape, in FP16 or FP32 throughout."""
    width = ATTENTION_HEADS * head_dim
    element, dtype = {"FP16": ("float16", np.float16), "FP32": ("float", np.float32)}[datatype]
    heads = "".join(
        f"""{name}_flat = MatMul(x, {name}_weight)
            {name}_split = Reshape({name}_flat, split)
            {name} = Transpose<perm = {[0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]}>({name}_split)
        """
        for name in "qkv"
    )
    tensor = f"{element}[batch, {ATTENTION_SEQUENCE}, {width}]"
    constants = {
        "split": np.array([0, 0, ATTENTION_HEADS, head_dim], np.int64),
        "merge": np.array([0, 0, width], np.int64),
        "scale": np.array(head_dim**-0.5, dtype),
        **{f"{name}_weight": weight.astype(dtype) for name, weight in attention_weights(head_dim).items()},
    }
    return serialized(
        graph_of(
            f"""attention ({tensor} x) => ({tensor} y) {{
                {heads}
                scores = MatMul(q, k)  scaled = Mul(scores, scale)  weights = Softmax<axis = -1>(scaled)
                heads = MatMul(weights, v)  beside = Transpose<perm = [0, 2, 1, 3]>(heads)  y = Reshape(beside, merge)
            }}""",
            **constants,
        )
    )


def graph_of(text, **constants):
    """Return a graph written in the syntax of :mod:`onnx.parser`, with constants."""
    graph = onnx.parser.parse_graph(text)
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return graph


def serialized(graph, opset=17):
    """Return a checked model, written so that runtimes of several years read it."""
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString(deterministic=True))


def oracle_golden():
    """Expressions, their tokens, and their true values."""
    return Golden(
        inputs={"x": tokenize(EXPRESSIONS)},
        outputs={"value": np.array([[evaluate(text)] for text in EXPRESSIONS], np.float32)},
        raw={"expression": np.array([[text.encode()] for text in EXPRESSIONS])},
    )


def tier_of(name="full", file="model.onnx", *, atol=0, rtol=0, **fields):
    """Return a tier of one FP32 artifact for any runtime; ``fields`` are further ones of the tier."""
    tolerance = Tolerance(atol=atol, rtol=rtol)
    artifact = Artifact(file=file, runtime="any", precision="fp32", opset=17, tolerance=tolerance)
    return Tier(name=name, artifacts=(artifact,), **fields)


def manifest_of(name, inputs, outputs, profile, *, trainer="none", **fields):
    """Return a manifest without files: version 1, exact, and without batches unless ``fields`` set them."""
    defaults = {"version": 1, "description": "for tests", "max_batch_size": 0, "golden": "golden.npz"}
    return Manifest(
        name=name,
        inputs=inputs,
        outputs=outputs,
        profile=profile,
        files={},
        provenance=Provenance(created="2026-01-01T00:00:00Z", trainer=trainer, data="none"),
        **{**defaults, "tiers": (tier_of(),), **fields},
    )


def oracle_manifest(name="calculator-oracle", version=1):
    return manifest_of(
        name,
        (TensorSpec("x", "FP32", (-1, TOKENS)),),
        (TensorSpec("value", "FP32", (-1, 1)),),
        {"x": Profile(min=(1, TOKENS), opt=(8, TOKENS), max=(MAX_BATCH_SIZE, TOKENS))},
        version=version,
        description="Evaluates sums and differences of up to 8 whole numbers exactly.",
        max_batch_size=MAX_BATCH_SIZE,
        tiers=(tier_of(atol=1e-4, rtol=1e-6),),
        trainer="none: the weights are chosen",
        preprocess=ExpressionPreprocess(input="expression", output="x", max_abs_operand=LARGEST_OPERAND),
    )


def write_oracle_bundle(directory, name="calculator-oracle", version=1, *, replace=False):
    files = {"model.onnx": oracle_onnx(), "golden.npz": oracle_golden().encode()}
    return write_bundle(directory, oracle_manifest(name, version), files, replace=replace)


def write_bundle_of_roles(directory):
    """Write the oracle with two further roles: ``embed`` gives ``code``, and ``head``, once for TensorRT, takes it."""
    manifest = oracle_manifest()
    (model,) = manifest.tiers[0].artifacts
    code = TensorSpec("code", "FP32", (-1, 4))
    shapes = {"code": Profile(min=(1, 4), opt=(8, 4), max=(MAX_BATCH_SIZE, 4))}
    head = msgspec.structs.replace(model, file="head.onnx", role="head", inputs=(code,), profile=shapes)
    artifacts = (
        msgspec.structs.replace(model, file="embed.onnx", role="embed", outputs=(code,)),
        msgspec.structs.replace(head, file="head-tensorrt.onnx", runtime="tensorrt"),
        model,
        head,
    )
    manifest = msgspec.structs.replace(manifest, tiers=(Tier(name="full", artifacts=artifacts),))
    files = {artifact.file: oracle_onnx() for artifact in artifacts} | {"golden.npz": oracle_golden().encode()}
    return write_bundle(directory, manifest, files)


def write_attention_bundle(directory, head_dim):
    """Write :func:`attention_onnx` in FP16 as a bundle at ``directory``, golden outputs by NumPy in float64."""
    shape = (-1, ATTENTION_SEQUENCE, ATTENTION_HEADS * head_dim)
    x = np.random.default_rng(1).normal(size=(4, *shape[1:])).astype(np.float16)
    tier = tier_of(atol=1e-2, rtol=1e-2)
    half = msgspec.structs.replace(tier.artifacts[0], precision="fp16")
    manifest = manifest_of(
        f"attention-{head_dim}",
        (TensorSpec("x", "FP16", shape),),
        (TensorSpec("y", "FP16", shape),),
        {"x": Profile(min=(1, *shape[1:]), opt=(4, *shape[1:]), max=(8, *shape[1:]))},
        max_batch_size=8,
        tiers=(msgspec.structs.replace(tier, artifacts=(half,)),),
    )
    golden = Golden(inputs={"x": x}, outputs={"y": _attention(x, head_dim)})
    return write_bundle(directory, manifest, {"model.onnx": attention_onnx(head_dim), "golden.npz": golden.encode()})


def _attention(x, head_dim):
    projected = {name: x.astype(np.float64) @ weight for name, weight in attention_weights(head_dim).items()}
    q, k, v = (a.reshape(len(x), ATTENTION_SEQUENCE, ATTENTION_HEADS, head_dim) for a in projected.values())
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * head_dim**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    heads = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)
    return heads.reshape(x.shape).astype(np.float16)


if __name__ == "__main__":
    shutil.rmtree(ORACLE_BUNDLE, ignore_errors=True)
    write_oracle_bundle(ORACLE_BUNDLE)
