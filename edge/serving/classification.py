"""The largest values of an output as texts, with their index and label: Triton's extension ``classification``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge.datatypes import Array


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
