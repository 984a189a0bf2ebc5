"""torch to ONNX: standard operators that TensorRT and ONNX Runtime both read, checked against torch."""

from __future__ import annotations

import ast
import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import Tensor, nn

from edge.bundles.golden import Golden, GoldenReport, check_runner
from edge.bundles.manifest import Tolerance
from edge.datatypes import Array
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner

#: JetPack 6's TensorRT (10.3) reads it, and so does every ONNX Runtime since 1.14.
OPSET = 18
#: Metadata of the exporter: lists of the classes and of the names of the modules around a node, and last the operator.
_CLASSES, _NAMES = "pkg.torch.onnx.class_hierarchy", "pkg.torch.onnx.name_scopes"
_LINEAR = "torch.nn.modules.linear.Linear"


def to_onnx(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str],
    dynamic: Mapping[str, Mapping[int, str]],
    *,
    variadic: int = 0,
) -> bytes:
    """Return a module as a checked ONNX model, its weights inside.

    The matrix product of a linear layer has the name of its torch module.

    Args:
        module: to convert; it is put into evaluation mode.
        inputs: example inputs by their new names, in the order of the module's arguments. A dynamic dimension needs at
            least two items: the exporter takes one for a constant.
        dynamic: for each input with dynamic dimensions, dimension to symbolic name.
        variadic: number of last inputs that the module takes as ``*arguments``.
    """
    shapes: tuple[Any, ...] = tuple(
        {dimension: torch.export.Dim(label) for dimension, label in dynamic.get(name, {}).items()} for name in inputs
    )
    if variadic:
        shapes = (*shapes[:-variadic], shapes[-variadic:])
    with _quiet_exporter():
        program = torch.onnx.export(
            module.eval(),
            tuple(inputs.values()),
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_shapes=shapes,
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None, "the dynamo exporter returns a program"
    # A module that runs twice has two products.
    named: set[str] = set()
    for node in program.model.graph:
        if node.op_type in ("MatMul", "Gemm") and _LINEAR in node.metadata_props.get(_CLASSES, ""):
            name = ast.literal_eval(node.metadata_props[_NAMES])[-2]
            if name not in named:
                node.name = name
                named.add(name)
    # The exporter's metadata double the size, and quote source lines with the paths of this machine.
    ClearMetadataAndDocStringPass()(program.model)
    # The exporter names other tensors after their operator, such as "embedding", even if an output has that name.
    for node in program.model.graph:
        for value in node.outputs:
            if value.name in outputs and not value.is_graph_output():
                value.name = f"{value.name}.inner"
    model = program.model_proto
    onnx.checker.check_model(model, full_check=True)
    data: bytes = model.SerializeToString()
    return data


def dynamic_of(inputs: Mapping[str, Array]) -> dict[str, dict[int, str]]:
    """Return the usual dynamic dimensions: the rows, and except of pixels the tokens."""
    return {name: {0: "batch"} if array.ndim == 4 else {0: "batch", 1: "length"} for name, array in inputs.items()}


def golden_of(module: nn.Module, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Golden:
    """Return a golden set: real inputs and the module's outputs. A single tensor is the first output."""
    with torch.no_grad():
        answers = module.eval()(*(torch.from_numpy(array) for array in inputs.values()))
    if isinstance(answers, Tensor):
        answers = (answers,)
    return Golden(dict(inputs), {name: answer.numpy() for name, answer in zip(outputs, answers, strict=True)})


def largest_difference(model: bytes, golden: Golden, tolerance: Tolerance, subject: str) -> float:
    """Return the largest absolute difference of :func:`compared`, which raises."""
    return compared(model, golden, tolerance, subject).max_abs_diff


def compared(model: bytes, golden: Golden, tolerance: Tolerance, subject: str) -> GoldenReport:
    """Run the golden inputs through ONNX Runtime and return the differences to the golden outputs.

    Raises:
        GoldenError: a difference exceeds the tolerance.
    """
    with contextlib.closing(OnnxRuntimeRunner(model, subject=subject)) as runner:
        return check_runner(runner, golden, tolerance, subject, max_rows=0)


def outputs_of(model: bytes, inputs: Mapping[str, Array], subject: str) -> dict[str, Array]:
    """Return the outputs of an ONNX model on ONNX Runtime."""
    with contextlib.closing(OnnxRuntimeRunner(model, subject=subject)) as runner:
        return runner.infer(inputs)


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Silence three messages of the exporter that users cannot act on."""
    log = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = log.level
    log.setLevel(logging.ERROR)  # "torchvision is not installed", at every export
    try:
        with warnings.catch_warnings():
            # A name that torch has deprecated and uses itself.
            warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`", category=FutureWarning)
            # Inputs that share their batch dimension share its name on purpose.
            warnings.filterwarnings("ignore", message=r"# The axis name: \w+ will not be used", category=UserWarning)
            yield
    finally:
        log.setLevel(level)
