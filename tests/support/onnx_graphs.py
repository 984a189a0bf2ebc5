"""Small ONNX graphs, and their bundles by ``fewheads pack``."""

import json

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from export.cli.pack import pack
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


_ATTENTION = """<ir_version: 7, opset_import: ["" : {opset}]>
attention (float[n, {tokens}, 8] x) => (float[n, {tokens}, 8] y)
<float[8, 8] wq, float[8, 8] wk, float[8, 8] wv, float[8, 8] w, float[8] b, int64[4] split, int64[3] merge> {{
  read = Add(x, b)
  q = MatMul(read, wq)  k = MatMul(read, wk)  v = MatMul(read, wv)
  qb = Add(q, b)  kb = Add(k, b)  vb = Add(v, b)
  qs = Reshape(qb, split)  ks = Reshape(kb, split)  vs = Reshape(vb, split)
  qh = Transpose<perm = [0, 2, 1, 3]>(qs)
  kh = Transpose<perm = [0, 2, 3, 1]>(ks)
  vh = Transpose<perm = [0, 2, 1, 3]>(vs)
  logits = MatMul(qh, kh)
  shares = Softmax<axis = 3>(logits)
  sums = MatMul(shares, vh)
  turned = Transpose<perm = [0, 2, 1, 3]>(sums)
  merged = Reshape(turned, merge)
  out = MatMul(merged, w)
  y = Add(out, b)
}}"""


def attention(opset, split, merge, tokens="t"):
    """Return attention with two heads of 4; ``split`` and ``merge`` are the shapes before and behind it."""
    model = onnx.parser.parse_model(_ATTENTION.format(opset=opset, tokens=tokens))
    draw = np.random.default_rng(0)
    arrays = {name: draw.standard_normal((8, 8), np.float32) for name in ("wq", "wk", "wv", "w")}
    arrays |= {"b": draw.standard_normal(8, np.float32), "split": np.array(split), "merge": np.array(merge)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    del model.graph.value_info[:]
    return model.SerializeToString()
