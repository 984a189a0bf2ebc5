"""Small ONNX graphs, and their bundles by ``fewheads pack``."""

import json

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from export.pack.cli import pack
from tests.support.task_data import invoke

FLOAT = TensorProto.FLOAT
node = helper.make_node


def value(name, shape, datatype=FLOAT):
    return helper.make_tensor_value_info(name, datatype, shape)


def constant(name, array):
    return numpy_helper.from_array(np.asarray(array), name)


def model_of(nodes, inputs, outputs, constants=(), opset=17):
    made = helper.make_graph(nodes, "g", inputs, outputs, constants)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def write(path, data):
    path.write_bytes(data)
    return path


def packed(path, *options, name="own"):
    """Run the command on an ONNX file and return what it prints; its errors are raised."""
    named = ["--name", name] if name else []
    return json.loads(invoke(pack, path, "--repository", path.parent / "models", "--json", *named, *options))
