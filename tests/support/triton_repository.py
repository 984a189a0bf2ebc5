"""A small model repository of Triton, whose files are written as its documents do."""

import numpy as np

from tests.support.onnx_graphs import constant, model_of, node, value

LABELS = ("red", "green", "blue")
#: A batch whose rows the graph reads without a second dimension, with labels and dynamic batching.
RESHAPED = """
name: "reshaped"
platform: "onnxruntime_onnx"
max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] reshape: { shape: [ ] } } ]
output [
  { name: "logits", data_type: TYPE_FP32, dims: [ 3 ], label_filename: "labels.txt" },
  { name: "same" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [] } }
]
dynamic_batching { preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 100 preserve_ordering: true }
instance_group [ { count: 1 kind: KIND_CPU } ]
model_warmup [ { name: "w" batch_size: 1 inputs { key: "x" value: { data_type: TYPE_FP32 dims: 1 zero_data: true } } } ]
"""
#: No batch for clients, and one row for the graph, as in Triton's example of an image classifier.
UNBATCHED = """
backend: "onnxruntime"
input { name: "x" data_type: TYPE_FP32 dims: 2 dims: 3 reshape { shape: [ 1, 2, 3 ] } }
output { name: "y" data_type: TYPE_FP32 dims: 6 reshape { shape: [ 1, 6 ] } label_filename: "labels.txt" }
version_policy: { all { } }
"""


def reshaped():
    nodes = [node("Unsqueeze", ["x", "last"], ["column"]), node("Mul", ["column", "weights"], ["logits"])]
    nodes.append(node("Neg", ["x"], ["same"]))
    weights = [constant("weights", np.array([[1, 2, -1]], np.float32)), constant("last", np.array([1]))]
    return model_of(nodes, [value("x", ("n",))], [value("logits", ("n", 3)), value("same", ("n",))], weights)


def unbatched(factor):
    nodes = [node("Mul", ["x", "factor"], ["times"]), node("Flatten", ["times"], ["y"])]
    weights = [constant("factor", np.float32(factor))]
    return model_of(nodes, [value("x", ("n", 2, 3))], [value("y", ("n", 6))], weights)


def write_model(directory, config, versions):
    """Write a model; ``versions`` are ONNX files by their numbers, and a config of None is no file."""
    directory.mkdir(parents=True)
    for version, data in versions.items():
        (directory / str(version)).mkdir()
        (directory / str(version) / "model.onnx").write_bytes(data)
    if config is not None:
        (directory / "config.pbtxt").write_text(config)
    (directory / "labels.txt").write_text("".join(f"{label}\n" for label in LABELS))
    return directory


def write_repository(directory):
    write_model(directory / "reshaped", RESHAPED, {1: reshaped()})
    write_model(directory / "unbatched", UNBATCHED, {1: unbatched(2), 3: unbatched(3)})
    return directory
