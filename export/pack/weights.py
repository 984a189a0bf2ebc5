"""Reading an ONNX file whose weights are inside it, or in files beside it (external data)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from edge.errors import Raw, UsageError
from export.bundle.pack.graph import all_nodes

if TYPE_CHECKING:
    import onnx

#: Protobuf's limit for one message, and so for the one ONNX file of a bundle.
MOST_BYTES = 2**31 - 1
_GIB = 1024**3


def read_with_weights(path: Path) -> tuple[onnx.ModelProto, bytes]:
    """Return a model with all its weights, and the bytes of the file that holds them.

    Raises:
        UsageError: the file is not an ONNX model, a file with its weights is missing, or all together exceed 2 GiB.
    """
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
        raise UsageError(
            f"weights of {path}",
            given=Raw(f"no file {', '.join(missing)} in {path.parent}"),
            expected=f"the external data of the model: {', '.join(external)}",
            fix="Copy these files beside the model, under the names that they had when it was exported.",
        )
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


def _check_size(path: Path, size: int) -> None:
    if size > MOST_BYTES:
        given = Raw(f"{size / _GIB:.2f} GiB")
        fix = "Export the model in FP16, which halves it, or split it into two models."
        expected = "less than 2 GiB with all weights, protobuf's limit for the one ONNX file of a bundle"
        raise UsageError(f"size of {path}", given=given, expected=expected, fix=fix)


def _no_model(path: Path, given: object) -> UsageError:
    fix = "Give the .onnx file that your framework exported, such as that of torch.onnx.export."
    return UsageError(f"model {path}", given=Raw(given), expected="an ONNX model", fix=fix)
