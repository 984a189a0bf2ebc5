"""Forms of queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tests.kernel_forms.graph import D, Form, H, R


def three(g: Form, x: str, *biases: bool, kind: str = "fp16") -> list[str]:
    return [g.heads(g.linear(x, D, H * R, bias, kind)) for bias in biases]


def one(g: Form, x: str, bias: bool = True, kind: str = "fp16") -> list[str]:
    return g.thirds(g.heads(g.linear(x, D, 3 * H * R, bias, kind), 3 * H))


def bias_behind(g: Form, x: str) -> list[str]:
    q, k, v = three(g, x, False, False, False)
    return [g.op("Add", q, g.weight(1, H, 1, R)), k, v]


def split_before(g: Form, x: str) -> list[str]:
    return [g.heads(part) for part in g.thirds(g.linear(x, D, 3 * H * R, False), 2, H * R)]


def five(g: Form, x: str) -> list[str]:
    y = g.op("Reshape", g.linear(x, D, 3 * H * R), g.ints(0, 0, 3, H, R))
    return [g.op("Squeeze", part, g.ints(0)) for part in g.thirds(g.turn(y, 2, 0, 3, 1, 4), 0, 1)]


def interleaved(g: Form, x: str) -> list[str]:
    return g.thirds(g.heads(g.linear(x, D, 3 * H * R), H, 3 * R), 3, R)


def keys_and_values(g: Form, x: str) -> list[str]:
    pair = g.op("Split", g.heads(g.linear(x, D, 2 * H * R, False), 2 * H), g.ints(H, H), axis=1, outs=2)
    return [*three(g, x, True), *pair]


def transposed(g: Form, x: str, convolution: bool = False) -> list[str]:
    turned = g.turn(x, 0, 2, 1)
    if convolution:
        y = g.op("Conv", g.op("Unsqueeze", turned, g.ints(2)), g.weight(3 * H * R, D, 1, 1), g.weight(3 * H * R))
    else:
        y = g.op("Add", g.op("MatMul", g.weight(1, 3 * H * R, D), turned), g.weight(3 * H * R, 1))
    y = g.op("Reshape", y, g.ints(0, 3 * H, R, -1))
    return [g.turn(part, 0, 1, 3, 2) for part in g.thirds(y)]


def by_head(g: Form, x: str) -> list[str]:
    product = g.op("MatMul", g.op("Unsqueeze", x, g.ints(1)), g.weight(1, 3 * H, D, R))
    return g.thirds(g.op("Add", product, g.weight(1, 3 * H, 1, R)))


def three_by_head(g: Form, x: str) -> list[str]:
    read = g.op("Unsqueeze", x, g.ints(1))
    return [g.op("MatMul", read, g.weight(1, H, D, R)) for _ in range(3)]


def stacked(g: Form, x: str) -> list[str]:
    parts = g.thirds(g.op("MatMul", g.op("Reshape", x, g.ints(1, -1, D)), g.weight(3, D, H * R)), 0, 1)
    return [g.turn(g.op("Reshape", g.op("Squeeze", part, g.ints(0)), g.sizes(x, H, R)), 0, 2, 1, 3) for part in parts]


def ones(g: Form, x: str) -> list[str]:
    wide = g.op("Pad", x, g.ints(0, 0, 0, 0, 0, 8), g.const(1.0), mode="constant")
    return [g.heads(g.linear(wide, D + 8, H * R, False)) for _ in range(3)]


#: Tokens to queries, keys and values [N, H, T, R].
QKV: dict[str, Callable[[Form, str], Sequence[str]]] = {
    "three products with biases": lambda g, x: three(g, x, True, True, True),
    "three products, a bias for the queries only": lambda g, x: three(g, x, True, False, False),
    "three products without biases": lambda g, x: three(g, x, False, False, False),
    "one product, split before the heads": split_before,
    "three products, the queries' bias after the transposition": bias_behind,
    "one product [N, T, 3h, r]": one,
    "one product [N, T, 3h, r] without a bias": partial(one, bias=False),
    "one product [N, T, h, 3r]": interleaved,
    "one product [N, T, 3, h, r]": five,
    "one product for keys and values, one for queries": keys_and_values,
    "one product with transposed weights": transposed,
    "a convolution": partial(transposed, convolution=True),
    "a product for each head: one": by_head,
    "a product for each head: three": three_by_head,
    "a product of [1, N * T, d] with [3, d, h * r]": stacked,
    "ones behind the features": ones,
}
