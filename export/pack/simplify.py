"""Graphs that are folded by ONNX Runtime, in standard operators, before they are converted to FP16 or INT8."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx
import onnxruntime
from onnx import ModelProto


def simplified(model: ModelProto) -> ModelProto:
    """Return a model with constants folded into weights, and batch normalisations into convolutions.

    The variances and weights of a batch normalisation may be outside the range of FP16 where their quotient is not.
    """
    options = onnxruntime.SessionOptions()
    # The basic level writes standard operators only.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    with tempfile.TemporaryDirectory() as directory:
        options.optimized_model_filepath = path = str(Path(directory, "simplified.onnx"))
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        folded = onnx.load(path)
    used = {node.domain for node in folded.graph.node} | {""}
    for unused in [each for each in folded.opset_import if each.domain not in used]:
        folded.opset_import.remove(unused)
    return folded
