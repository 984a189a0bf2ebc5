"""The same models twice: as bundles for this server, and as a repository of Triton's Python backend.

Both have the same names, inputs, outputs and bounds:

- ``mixed`` 1 returns what it gets: FP32 [-1, 4], INT64 [-1, 2] and BYTES [-1, 1], up to 8 rows.
- ``flat`` 1 returns FP32 [-1], without a batch.
- ``slow`` 1 computes for about half a millisecond per step, ``steps`` being INT64 [-1, 1] with one row at most.
- ``failing`` 1 looks ``index`` (INT64 [1]) up in a table of two, and fails beyond it.
- ``versioned`` 1 and 3 are like ``flat``.
- ``broken`` cannot be loaded.
"""

from typing import NamedTuple

import numpy as np

from edge.bundles.bundle import write_bundle
from edge.bundles.golden import Golden
from edge.bundles.manifest import Profile
from edge.datatypes import Array, TensorSpec
from tests.support.models import graph_of, manifest_of, serialized
from tests.support.server_models import failing_graph, loop_graph

ROWS = 8
QUEUE_SIZE = 32
#: What an outlier of ``flat`` may have; more is beyond its profile here, while Triton has no such bound.
ELEMENTS = 4096
#: About as long as one step of ``slow`` takes here.
_STEP_SECONDS = 0.0005
_ONNX = {"FP32": "float", "INT64": "int64", "BYTES": "string"}
_TRITON = {"FP32": "TYPE_FP32", "INT64": "TYPE_INT64", "BYTES": "TYPE_STRING"}


class Shape(NamedTuple):
    """Inputs by datatype and shape, one golden input of each, the largest batch, or 0, and versions."""

    inputs: dict[str, tuple[str, tuple[int, ...]]]
    golden: dict[str, Array]
    rows: int = 0
    versions: tuple[int, ...] = (1,)


MODELS = {
    "mixed": Shape(
        {"real": ("FP32", (-1, 4)), "whole": ("INT64", (-1, 2)), "text": ("BYTES", (-1, 1))},
        {"real": np.ones((1, 4), np.float32), "whole": np.ones((1, 2), np.int64), "text": np.array([[b"a"]])},
        ROWS,
    ),
    "flat": Shape({"x": ("FP32", (-1,))}, {"x": np.ones(2, np.float32)}),
    "versioned": Shape({"x": ("FP32", (-1,))}, {"x": np.ones(2, np.float32)}, versions=(1, 3)),
    "slow": Shape({"steps": ("INT64", (-1, 1))}, {"steps": np.full((1, 1), 20)}, 1),
    "failing": Shape({"index": ("INT64", (1,))}, {"index": np.ones(1, np.int64)}),
    "broken": Shape({"x": ("FP32", (-1,))}, {"x": np.ones(2, np.float32)}),
}


def output(name):
    return f"{name}_out"


def write_bundles(directory):
    for name, shape in MODELS.items():
        for version in shape.versions:
            _write_bundle(directory / (name if shape.versions == (1,) else f"{name}-{version}"), name, version, shape)
    (directory / "broken" / "model.onnx").write_bytes(b"broken")


def _write_bundle(path, name, version, shape):
    specs = {tensor: TensorSpec(tensor, *spec) for tensor, spec in shape.inputs.items()}
    most = {key: tuple(size if size > 0 else shape.rows or ELEMENTS for size in s.shape) for key, s in specs.items()}
    profile = {
        tensor: Profile(min=tuple(max(size, 1) for size in spec.shape), opt=most[tensor], max=most[tensor])
        for tensor, spec in specs.items()
        if -1 in spec.shape
    }
    outputs = tuple(TensorSpec(output(s.name), s.datatype, s.shape) for s in specs.values())
    manifest = manifest_of(name, tuple(specs.values()), outputs, profile, version=version, max_batch_size=shape.rows)
    golden = Golden(shape.golden, {output(tensor): value for tensor, value in shape.golden.items()})
    graphs = {"slow": loop_graph("steps_out", ["n", 1]), "failing": failing_graph("index_out", np.arange(2))}
    graph = graphs.get(name) or _identity(shape)
    write_bundle(path, manifest, {"model.onnx": serialized(graph), "golden.npz": golden.encode()})


def _identity(shape):
    def tensors(name_of):
        each = (f"{_ONNX[kind]}{list(dims)} {name_of(name)}" for name, (kind, dims) in shape.inputs.items())
        return ", ".join(each).replace("-1", "n")

    nodes = " ".join(f"{output(name)} = Identity({name})" for name in shape.inputs)
    return graph_of(f"identity ({tensors(str)}) => ({tensors(output)}) {{ {nodes} }}")


_MODEL = """
import json
import time

import numpy as np
import triton_python_backend_utils as utils


class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_name"]
        self.inputs = [tensor["name"] for tensor in json.loads(args["model_config"])["input"]]
        if self.name == "broken":
            raise RuntimeError("broken")

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        outputs = []
        for name in self.inputs:
            value = utils.get_input_tensor_by_name(request, name).as_numpy()
            if self.name == "slow":
                time.sleep(float(value.max()) * STEP_SECONDS)
            if self.name == "failing" and value[0] not in (0, 1):
                return utils.InferenceResponse(error=utils.TritonError("beyond the table"))
            outputs.append(utils.Tensor(name + "_out", value))
        return utils.InferenceResponse(outputs)
"""


def write_repository(directory):
    for name, shape in MODELS.items():
        for version in shape.versions:
            (directory / name / str(version)).mkdir(parents=True)
            source = _MODEL.replace("STEP_SECONDS", str(_STEP_SECONDS))
            (directory / name / str(version) / "model.py").write_text(source)
        (directory / name / "config.pbtxt").write_text(_config(name, shape))


def _config(name, shape):
    skip = 1 if shape.rows else 0
    lines = [f'name: "{name}"', 'backend: "python"', f"max_batch_size: {shape.rows}", "version_policy { all {} }"]
    for tensor, (datatype, dims) in shape.inputs.items():
        spec = f"data_type: {_TRITON[datatype]} dims: {list(dims[skip:])}"
        lines += [f'input {{ name: "{tensor}" {spec} }}', f'output {{ name: "{output(tensor)}" {spec} }}']
    lines.append("instance_group { count: 1 kind: KIND_CPU }")
    if shape.rows:
        # A request may only ask for less than the default.
        queue = "timeout_action: REJECT allow_timeout_override: true default_timeout_microseconds: 600000000"
        queue += f" max_queue_size: {QUEUE_SIZE}"
        levels = "priority_levels: 10 default_priority_level: 5"
        lines.append(f"dynamic_batching {{ {levels} default_queue_policy {{ {queue} }} }}")
    return "\n".join(lines) + "\n"
