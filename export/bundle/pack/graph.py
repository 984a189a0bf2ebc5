"""The graph of a user's ONNX file: its weights, inside it or in files beside it, and its operators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edge.errors import Raw, UsageError
from export.quantize.nested import nodes_of

if TYPE_CHECKING:
    import onnx

#: Protobuf's limit for one message, and so for the one ONNX file of a bundle.
MOST_BYTES = 2**31 - 1
_GIB = 1024**3
_STANDARD = ("", "ai.onnx")
#: Domains that ONNX Runtime has beside the standard one.
_ONNX_RUNTIME = ("ai.onnx.ml", "com.microsoft")
#: Operators whose outputs' sizes depend on values. TensorRT-RTX 1.7 builds none of them, and our TensorRT runner
#: allocates outputs before a run, from the shapes of the inputs.
_SIZED_BY_VALUES = ("NonZero", "NonMaxSuppression", "Unique", "Compress")
_CONTROL_FLOW = ("If", "Loop", "Scan")


def read_with_weights(path: Path) -> tuple[onnx.ModelProto, bytes]:
    """Return a model with all weights, and its file's bytes; a UsageError refuses no model, and more than 2 GiB."""
    import onnx

    try:
        size = path.stat().st_size
        _check_size(path, size)
        data = path.read_bytes()
        model = onnx.load_model_from_string(data)
    except UsageError:
        raise
    except Exception as error:  # protobuf's errors have no common class
        raise _no_model(path, error.strerror if isinstance(error, OSError) and error.strerror else error) from None
    if not model.graph.node:
        raise _no_model(path, "no graph with nodes")
    external = _external_files(model)
    if not external:
        return model, data
    files = [path.parent / name for name in external]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        given = Raw(f"no file {', '.join(missing)} in {path.parent}")
        expected = f"the external data of the model: {', '.join(external)}"
        fix = "Copy these files beside the model, under the names that they had when it was exported."
        raise UsageError(f"weights of {path}", given=given, expected=expected, fix=fix)
    _check_size(path, size + sum(file.stat().st_size for file in files))
    try:
        onnx.load_external_data_for_model(model, str(path.parent))
        return model, model.SerializeToString()
    except Exception as error:  # onnx.checker, protobuf and the operating system raise classes of their own
        fix = "Export the model again, without external data if it is below 2 GiB."
        expected = "external data that onnx reads"
        raise UsageError(f"weights of {path}", given=Raw(error), expected=expected, fix=fix) from None


def _external_files(model: onnx.ModelProto) -> list[str]:
    """Return the names of the files that hold external data, relative to the model's directory."""
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data

    return sorted({ExternalDataInfo(tensor).location for tensor in tensors_of(model) if uses_external_data(tensor)})


def tensors_of(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield the weights of a model and its nested graphs, and the constants of nodes, also in functions."""
    yield from model.graph.initializer
    for attribute in (attribute for node in all_nodes(model) for attribute in node.attribute):
        yield attribute.t
        for graph in (attribute.g, *attribute.graphs):
            yield from graph.initializer


def datatype_name(number: int) -> str:
    """Return ONNX's name of a type of elements, or its number if that is none of them."""
    from onnx import TensorProto

    return next((name for name, value in TensorProto.DataType.items() if value == number), f"{number}")


def _check_size(path: Path, size: int) -> None:
    if size > MOST_BYTES:
        given = Raw(f"{size / _GIB:.2f} GiB")
        fix = "Export the model in FP16, which halves it, or split it into two models."
        expected = "less than 2 GiB with all weights, protobuf's limit for the one ONNX file of a bundle"
        raise UsageError(f"size of {path}", given=given, expected=expected, fix=fix)


def _no_model(path: Path, given: object) -> UsageError:
    fix = "Give the .onnx file that your framework exported, such as that of torch.onnx.export."
    return UsageError(f"model {path}", given=Raw(given), expected="an ONNX model", fix=fix)


class Operators(NamedTuple):
    """What the operators of a graph permit.

    Attributes:
        only_onnxruntime: why TensorRT cannot run the graph; empty if no known reason forbids it.
        control_flow: which of ``If``, ``Loop`` and ``Scan`` it has. TensorRT builds them; the conversions to FP16 and
            INT8 do not take them, because they would have to change the types of nested graphs.
    """

    only_onnxruntime: str
    control_flow: tuple[str, ...]


def check_operators(model: onnx.ModelProto, opset: int, path: Path) -> Operators:
    """Return what the operators permit; a UsageError refuses those neither in the ONNX standard nor in ONNX Runtime."""
    import onnx

    local = {(function.domain, function.name) for function in model.functions}
    nodes = [node for node in all_nodes(model) if (node.domain, node.op_type) not in local]
    unknown = [node for node in nodes if not _is_known(node, opset) and node.domain not in _ONNX_RUNTIME]
    custom = sorted({f"{node.domain}.{node.op_type}".lstrip(".") for node in unknown})
    if custom:
        expected = f"operators of ONNX, opset {opset}, or of ONNX Runtime ({', '.join(_ONNX_RUNTIME)})"
        fix = "Replace the layers that use them by standard ones, and export the model again."
        raise UsageError(f"operators of {path}", given=Raw(", ".join(custom)), expected=expected, fix=fix)
    kinds = {node.op_type for node in nodes if node.domain in _STANDARD}
    own = sorted({f"{node.domain}.{node.op_type}" for node in nodes if node.domain in _ONNX_RUNTIME})
    by_values = [kind for kind in _SIZED_BY_VALUES if kind in kinds]
    reasons = [f"{', '.join(own)} of ONNX Runtime" if own else ""]
    reasons += [f"{', '.join(by_values)}, whose outputs' sizes depend on values" if by_values else ""]
    types = {tensor.type.tensor_type.elem_type for tensor in (*model.graph.input, *model.graph.output)}
    reasons += ["text tensors" if onnx.TensorProto.STRING in types else ""]
    control_flow = tuple(kind for kind in _CONTROL_FLOW if kind in kinds)
    return Operators(" and ".join(filter(None, reasons)), control_flow)


def _is_known(node: onnx.NodeProto, opset: int) -> bool:
    import onnx

    if node.domain not in _STANDARD:
        return False
    try:
        onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return False
    return True


def all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a model and its functions, and those of the graphs nested in them."""
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        yield from nodes_of(nodes)
