"""Operators of a graph: custom ones, and those that only ONNX Runtime runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edge.errors import Raw, UsageError

if TYPE_CHECKING:
    import onnx

_STANDARD = ("", "ai.onnx")
#: Domains that ONNX Runtime has beside the standard one.
_ONNX_RUNTIME = ("ai.onnx.ml", "com.microsoft")
#: Operators whose outputs' sizes depend on values. TensorRT-RTX 1.7 builds none of them, and our TensorRT runner
#: allocates outputs before a run, from the shapes of the inputs.
_SIZED_BY_VALUES = ("NonZero", "NonMaxSuppression", "Unique", "Compress")
_CONTROL_FLOW = ("If", "Loop", "Scan")


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
    """Return what the operators permit.

    Raises:
        UsageError: an operator is a custom one, neither in the ONNX standard nor in ONNX Runtime.
    """
    import onnx

    local = {(function.domain, function.name) for function in model.functions}
    nodes = [node for node in all_nodes(model) if (node.domain, node.op_type) not in local]
    custom = sorted(
        {
            f"{node.domain}.{node.op_type}".lstrip(".")
            for node in nodes
            if not _is_known(node, opset) and node.domain not in _ONNX_RUNTIME
        }
    )
    if custom:
        raise UsageError(
            f"operators of {path}",
            given=Raw(", ".join(custom)),
            expected=f"operators of ONNX, opset {opset}, or of ONNX Runtime ({', '.join(_ONNX_RUNTIME)})",
            fix="Replace the layers that use them by standard ones, and export the model again.",
        )
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


def nodes_of(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes, and those of the graphs nested in them."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from nodes_of(graph.node)
