"""Triton's extension ``classification``: the largest values of an output as texts, with their index and label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from edge.datatypes import NUMPY_TYPES, Array, TensorSpec
from edge.errors import InvalidRequest, Literally
from edge.pb import inference_pb2 as pb

_PARAMETER: Final = "classification"


def requested_classes(request: pb.ModelInferRequest, specs: Mapping[str, TensorSpec]) -> dict[str, int]:
    """Return how many of the largest values a request wants, by output; raise an InvalidRequest if that is no number.

    ``specs`` contains the outputs that the request names.
    """
    classes: dict[str, int] = {}
    for output in request.outputs:
        if _PARAMETER not in output.parameters:
            continue
        subject, parameter = f"parameter {_PARAMETER!r} of output {output.name!r}", output.parameters[_PARAMETER]
        if parameter.WhichOneof("parameter_choice") != "int64_param" or parameter.int64_param < 1:
            given, fix = Literally(f"{parameter}".strip() or "nothing"), "Send the number of values to return."
            raise InvalidRequest(subject, given=given, expected="an integer of 1 or more", fix=fix)
        datatype = specs[output.name].datatype
        if NUMPY_TYPES[datatype].kind not in "fiu":
            fix = "Rank an output of numbers, such as the logits."
            raise InvalidRequest(subject, given=Literally(f"it for {datatype}"), expected="it for numbers", fix=fix)
        classes[output.name] = parameter.int64_param
    return classes


def largest_classes(values: Array, count: int, labels: Sequence[str], rows: int) -> Array:
    """Return the largest values as ``VALUE:INDEX:LABEL``, the largest first, BYTES [rows, count].

    Without ``labels`` the last part is left out; without ``rows``, of a model without a batch, the shape is [count].
    There are no more than there are values.
    """
    table = values.reshape(max(rows, 1), -1)
    order = np.argsort(-table.astype(np.float64), axis=1, kind="stable")[:, :count]
    form = "%f" if table.dtype.kind == "f" else "%d"
    texts = np.empty(order.shape, np.object_)
    for place, index in np.ndenumerate(order):
        label = f":{labels[index]}" if labels else ""
        texts[place] = f"{form % table[place[0], index]}:{index}{label}".encode()
    return texts if rows else texts[0]
