"""Models for tests of servers: one that returns its input, and one that computes for as long as a request says."""

from itertools import pairwise

import numpy as np
import onnx
from onnx import TensorProto, helper

from edge.bundles.bundle import write_bundle
from edge.bundles.golden import Golden
from edge.bundles.manifest import Profile
from edge.datatypes import NUMPY_TYPES, TensorSpec
from edge.pb import inference_pb2 as pb
from tests.support.models import graph_of, manifest_of, serialized, tier_of
from tests.support.sample_requests import raw_request

_ELEMENTS = {name: helper.np_dtype_to_tensor_dtype(dtype) for name, dtype in NUMPY_TYPES.items()}
ECHO_MAX = 4096


def echo_input(datatype):
    return f"in_{datatype.lower()}"


def echo_output(datatype):
    return f"out_{datatype.lower()}"


def write_echo_bundle(directory, datatype):
    """``echo-<datatype>``: out equals in, one dynamic dimension that is not a batch."""
    name, result = echo_input(datatype), echo_output(datatype)
    element = TensorProto.DataType.Name(_ELEMENTS[datatype]).lower()
    graph = graph_of(f"echo ({element}[n] {name}) => ({element}[n] {result}) {{ {result} = Identity({name}) }}")
    value = np.array([b"a", b"bc"]) if datatype == "BYTES" else np.array([0, 1], NUMPY_TYPES[datatype])
    return write_bundle_of(directory, f"echo-{datatype.lower()}", serialized(graph), {name: value}, {result: value})


def write_busy_bundle(directory, steps=20):
    """``busy``: multiplies 256 x 256 matrices ``steps`` times, which takes some 0.2 to 1 ms each, and returns steps.

    By default, its golden set has so many steps that the scheduler computes none of its runs on the event loop.
    """
    graph = loop_graph("done", [1])
    value = np.array([steps], np.int64)
    return write_bundle_of(directory, "busy", serialized(graph), {"steps": value}, {"done": value})


def loop_graph(output, shape):
    """A graph that multiplies matrices as often as ``steps`` (INT64) says, and returns ``steps``."""
    steps = f"int64[{', '.join(map(str, shape))}]"
    return graph_of(
        f"""loop ({steps} steps) => ({steps} {output}) {{
            count = ReduceMax<keepdims = 0>(steps)
            last = Loop<body = body (int64 step, bool going, float[256, 256] state)
                => (bool still, float[256, 256] next) {{
                    still = Identity(going)
                    next = MatMul(state, matrix)
                }}>(count, , matrix)
            largest = ReduceMax<keepdims = 0>(last)  one = Cast<to = {TensorProto.INT64}>(largest)
            {output} = Mul(steps, one)
        }}""",
        matrix=np.eye(256, dtype=np.float32),  # so that the largest of its powers is 1
    )


def failing_graph(output, elements):
    """A graph that returns the element at ``index`` (INT64, [1]); beyond the last one the runtime fails."""
    return graph_of(
        f"""failing (int64[1] index) => (int64[1] {output}) {{
            near = Clip(index, first, last)  inside = Equal(near, index)
            size = Cast<to = {TensorProto.INT64}>(inside)  found = Gather(elements, near)
            {output} = Reshape<allowzero = 1>(found, size)
        }}""",
        elements=elements,
        first=np.array(0),
        last=np.array(len(elements) - 1),
    )


def table_graph(rows):
    """A graph that returns ``table[ids]``, [n, 2], for ``ids`` (INT64, [n, 1]); row by row its number."""
    return graph_of(
        "table (int64[n, 1] ids) => (float[n, 2] vector) { found = Gather(table, ids) vector = Squeeze(found, axis) }",
        table=np.repeat(np.arange(rows, dtype=np.float32), 2).reshape(rows, 2),
        axis=np.array([1]),
    )


def write_bundle_of(directory, name, model, inputs, outputs, max_batch_size=0):
    """The version 1 of ``name``; its inputs and outputs are the golden ones."""
    loaded = onnx.load_from_string(model)
    names = {info.name: info for info in (*loaded.graph.input, *loaded.graph.output)}
    types = {code: datatype for datatype, code in _ELEMENTS.items()}

    def spec(tensor):
        kind = names[tensor].type.tensor_type
        return TensorSpec(tensor, types[kind.elem_type], tuple(dim.dim_value or -1 for dim in kind.shape.dim))

    specs = tuple(spec(tensor) for tensor in inputs)
    profile = {s.name: Profile(min=(1,), opt=(8,), max=(ECHO_MAX,)) for s in specs if -1 in s.shape}
    if max_batch_size:
        rows = {"min": 1, "opt": 1, "max": max_batch_size}
        profile = {s.name: Profile(**{bound: (most, *s.shape[1:]) for bound, most in rows.items()}) for s in specs}
    results = tuple(spec(tensor) for tensor in outputs)
    manifest = manifest_of(name, specs, results, profile, max_batch_size=max_batch_size)
    files = {"model.onnx": model, "golden.npz": Golden(inputs, outputs).encode()}
    return write_bundle(directory / f"{name}-1", manifest, files)


def busy(steps, timeout_us=0):
    request = raw_request("busy", steps=np.array([steps], np.int64))
    if timeout_us:
        request.parameters["timeout"].int64_param = timeout_us
    return request


def failures(stub):
    return stub.ModelStatistics(pb.ModelStatisticsRequest(name="busy")).model_stats[0].inference_stats.fail.count


WIDTH = 1024
#: Layers of each tier; the time of a request is about proportional.
LAYERS = {"full": 480, "half": 240, "eighth": 60}


def tier_onnx(layers):
    """x [batch, 1024] through so many layers that change nothing: the identity."""
    names = ["x", *(f"x{index}" for index in range(1, layers)), "y"]
    nodes = " ".join(f"{after} = MatMul({before}, eye)" for before, after in pairwise(names))
    text = f"tier (float[batch, {WIDTH}] x) => (float[batch, {WIDTH}] y) {{ {nodes} }}"
    return serialized(graph_of(text, eye=np.eye(WIDTH, dtype=np.float32)))


def write_tiered_bundle(directory, layers=LAYERS, **fields):
    x = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)
    manifest = manifest_of(
        "tiered",
        (TensorSpec("x", "FP32", (-1, WIDTH)),),
        (TensorSpec("y", "FP32", (-1, WIDTH)),),
        {"x": Profile(min=(1, WIDTH), opt=(1, WIDTH), max=(4, WIDTH))},
        max_batch_size=4,
        tiers=tuple(tier_of(name, f"{name}.onnx", atol=1e-6) for name in layers),
        **fields,
    )
    files = {f"{name}.onnx": tier_onnx(number) for name, number in layers.items()}
    return write_bundle(directory, manifest, {**files, "golden.npz": Golden({"x": x}, {"y": x}).encode()})
