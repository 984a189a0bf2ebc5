"""Two layers of BERT with embeddings and a pooler on the first token, with tokens in several orders."""

from __future__ import annotations

from tests.kernel_forms.graph import D, F, Form, H, R

#: Order of tokens, and how the first one is chosen.
AROUND = {
    "[N, T, d]": ("ntd", "behind"),
    "[N, T, d], Slice before the last normalisation": ("ntd", "slice"),
    "[N * T, d]": ("nt", "behind"),
    "[N * T, 1, d]": ("nt1", "behind"),
    "[1, N * T, d]": ("1nt", "behind"),
    "[T, N, d]": ("tnd", "behind"),
    "[T, N, d], Slice before the last normalisation": ("tnd", "slice"),
    "[T * N, d], Gather of the first N rows before the last sum": ("tn", "sum"),
    "[T * N, d], Gather of the first N rows before the last normalisation": ("tn", "norm"),
}
_LEAD = {"nt": [-1], "tn": [-1], "nt1": [-1, 1], "1nt": [1, -1], "ntd": [0, 0], "tnd": [0, 0]}


def around(order: str, first: str) -> int:
    """Return the kernels in FP16."""
    g = Form()
    turned, lead = order.startswith("t"), _LEAD[order]
    sizes = g.op("Shape", "ids")
    tokens = g.op("Slice", sizes, g.ints(1), g.ints(2))
    rows = g.op("Slice", sizes, g.ints(0), g.ints(1))
    positions = g.op("Slice", g.weight(512, D), g.ints(0), tokens, g.ints(0))
    x = g.op("Add", g.op("Gather", g.weight(100, D), "ids"), positions)
    x = g.turn(x, 1, 0, 2) if turned else x
    x = g.op("Reshape", x, g.ints(*lead, D)) if 0 not in lead else x
    x, mask = g.norm(x), g.mask()
    apart = [g.ints(0, 0)] if 0 in lead else [tokens, rows] if turned else [rows, tokens]
    heads = g.op("Concat", *apart, g.ints(H, R), axis=0)

    def chosen(one: str) -> str:
        count = g.op("Squeeze", rows)
        numbers = g.op("Range", g.const(0, "int64"), count, g.const(1, "int64"))
        return g.op("Gather", one, g.op("Cast", numbers, to=6))

    axis = 0 if turned else 1
    for number in range(2):
        q, k, v = (
            g.turn(g.op("Reshape", g.linear(x, D, H * R, False), heads), *((1, 2, 0, 3) if turned else (0, 2, 1, 3)))
            for _ in range(3)
        )
        back = (2, 0, 1, 3) if turned else (0, 2, 1, 3)
        y = g.linear(g.attention(q, k, v, mask, back, g.ints(*lead, H * R)), H * R, D)
        last = number == 1
        y = [x, y]
        if last and first == "sum":
            y = [chosen(one) for one in y]
        x = g.op("Add", *y)
        x = chosen(x) if last and first == "norm" else x
        x = g.norm(x)
        x = g.op("Add", x, g.linear(g.op("Gelu", g.linear(x, D, F)), F, D))
        x = g.op("Slice", x, g.ints(0), g.ints(1), g.ints(axis)) if last and first == "slice" else x
        x = g.norm(x)
    if first == "behind" and 0 not in lead:
        x = g.op("Reshape", x, g.op("Concat", rows, tokens, g.ints(D), axis=0))
    if first in ("behind", "slice"):
        x = g.op("Gather", x, g.const(0, "int64"), axis=axis)
    y = g.linear(g.op("Tanh", g.linear(x, D, D)), D, 2)
    return g.kernels(y, {"ids": (7, ["N", "T"]), "mask": (7, ["N", "T"])})
