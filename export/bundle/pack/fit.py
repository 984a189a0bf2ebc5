"""The tensors of a ``config.pbtxt``, compared with those of its ONNX file, which gets the shapes of clients."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edge.errors import Raw, UsageError
from edge.pb import inference_pb2 as pb
from export.bundle.pack.graph import datatype_name

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto

#: Names of datatypes in ONNX, and in Triton where they differ.
_TYPES: Final = {"FLOAT": "FP32", "DOUBLE": "FP64", "FLOAT16": "FP16", "BFLOAT16": "BF16"}


def fit(model: ModelProto, path: Path, *, config: pb.ModelConfig, source: Path) -> None:
    """Give a graph the shapes that clients of Triton send and get; raise a UsageError if it has others."""
    weights, batched = {one.name for one in model.graph.initializer}, config.max_batch_size > 0
    inputs = {one.name: one for one in model.graph.input if one.name not in weights}
    missing = sorted(inputs.keys() - {tensor.name for tensor in config.input})
    if config.input and missing:
        fix = f"Add {missing[0]!r}, or leave out all of them: Triton reads them from the file, too."
        given = [tensor.name for tensor in config.input]
        raise UsageError(f"{source} input", given=given, expected=f"all inputs of {path}: {sorted(inputs)}", fix=fix)
    for tensor in config.input:
        _fit_tensor(model, inputs, tensor, batched, f"{source} input {tensor.name!r}", path)
        sizes = inputs[tensor.name].type.tensor_type.shape.dim[batched:]
        for size, fixed in zip(sizes, tensor.dims, strict=True):
            if fixed > 0:
                size.dim_value = fixed  # no client of Triton sends another one
    outputs = {one.name: one for one in model.graph.output}
    for output in config.output:
        _fit_tensor(model, outputs, output, batched, f"{source} output {output.name!r}", path)


def _fit_tensor(
    model: ModelProto,
    known: dict[str, ValueInfoProto],
    tensor: pb.ModelInput | pb.ModelOutput,
    batched: bool,
    subject: str,
    path: Path,
) -> None:
    from export.bundle.pack.nodes import reshape

    fix = f"Correct it, or leave out all inputs and outputs: Triton reads them from {path.name}, too."
    if tensor.name not in known:
        raise UsageError(subject, given=Raw("no tensor of it"), expected=f"one of {path}: {sorted(known)}", fix=fix)
    of_graph = known[tensor.name].type.tensor_type
    datatype = datatype_name(of_graph.elem_type)
    wanted, types = f"TYPE_{_TYPES.get(datatype, datatype)}", pb.DataType.items()
    given = next((name for name, number in types if number == tensor.data_type), f"{tensor.data_type}")
    if given != wanted:
        raise UsageError(f"{subject} data_type", given=Raw(given), expected=f"{wanted}, as {path} has it", fix=fix)
    outside = list(tensor.dims)
    inside = list(tensor.reshape.shape) if tensor.HasField("reshape") else outside
    if any(size < 1 and size != -1 for size in (*outside, *inside)):
        given_dims = outside if inside == outside else [outside, inside]
        raise UsageError(f"{subject} dims", given=given_dims, expected="sizes above 0, or -1 for any", fix=fix)
    has = [size.dim_value or -1 for size in of_graph.shape.dim]
    full = [-1] * batched + inside
    if len(has) != len(full) or any(size not in (-1, own) for size, own in zip(has, full, strict=True)):
        expected = f"dims that fit {has} of {path}" + ", whose first is the batch" * batched
        raise UsageError(f"{subject} dims", given=inside, expected=expected, fix=fix)
    if inside != outside:
        dynamic = max(outside.count(-1), inside.count(-1)) > 1
        if dynamic or (-1 in outside) != (-1 in inside) or (-1 not in outside and prod(outside) != prod(inside)):
            expected = f"as many elements as dims, {outside}, with one -1 at most"
            raise UsageError(f"{subject} reshape", given=inside, expected=expected, fix=fix)
        reshape(model, tensor.name, outside, inside, batched=batched)
