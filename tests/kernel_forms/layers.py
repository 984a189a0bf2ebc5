"""Layers, and types of their products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.kernel_forms.graph import D, F, Form, H, R
from tests.kernel_forms.qkv import one, three

#: Of INT8: the product of queries, keys and values, and the types of weights; ``fp16`` leaves tokens as they are, too.
INT8: dict[str, dict[str, Any]] = {
    "three products with a scale for each output": {"qkv": "three"},
    "one product": {},
    "one product, output projection in FP16": {"out": "fp16"},
    "the same, first product of the feed-forward with one scale": {"out": "fp16", "up": "one"},
    "one scale, three products without biases": {
        "qkv": "bare",
        "weights": "one",
        "out": "one",
        "up": "one",
        "down": "one",
    },
    "one scale, three products without biases, output projection in FP16": {
        "qkv": "bare",
        "weights": "one",
        "out": "fp16",
        "up": "one",
        "down": "one",
    },
    "attention in INT8": {"attention": "int8"},
    "attention and its products in FP16": {"qkv": "bare", "weights": "fp16", "out": "fp16"},
    "queries, keys and values in FP16": {"qkv": "bare", "weights": "fp16"},
    "attention's output rounded before its transposition": {"rounded": "before"},
    "attention's output rounded before its reshape": {"rounded": "between"},
    "output projection and second product of the feed-forward in INT8": {"down": "output"},
}


def layer(g: Form, x: str, mask: str, qkv: Callable[[Form, str], Sequence[str]] | None) -> str:
    """Return the tokens behind a layer, post-LN; ``how`` has the types of its products."""
    if qkv is not None:
        y = g.attention(*qkv(g, x), mask)
        y = g.rounded(y) if g.how.get("out", "fp16") != "fp16" and "rounded" not in g.how else y
        x = g.norm(g.op("Add", x, g.linear(y, H * R, D, kind=g.how.get("out", "fp16"))))
    up, down = g.how.get("up", "fp16"), g.how.get("down", "fp16")
    y = g.op("Gelu", g.linear(x if up == "fp16" else g.rounded(x), D, F, kind=up))
    y = g.linear(y if down == "fp16" else g.rounded(y), F, D, kind=down)
    return g.norm(g.op("Add", x, y))


def int8_products(g: Form, x: str) -> Sequence[str]:
    kind, qkv = g.how.get("weights", "output"), g.how.get("qkv", "one")
    read = x if kind == "fp16" else g.rounded(x)
    return one(g, read, kind=kind) if qkv == "one" else three(g, read, *[qkv == "three"] * 3, kind=kind)


def count(layers: int, qkv: Callable[[Form, str], Sequence[str]] | None, how: dict[str, Any]) -> int:
    """Return the kernels of some layers."""
    g = Form(**how)
    x = g.norm(g.op("Cast", "x", to=10))
    mask = g.mask()
    for _ in range(layers):
        x = layer(g, x, mask, qkv)
    return g.kernels(x, {"x": (1, ["N", "T", D]), "mask": (7, ["N", "T"])})


def feed_forwards(layers: int, how: dict[str, Any]) -> int:
    """Return the kernels of some layers without attention.

    Args:
        how: types of ``up`` and ``down``; the activation ``act``; whether ``up`` has a ``bias``; ``residual``, whether
            the sum reads the rounded tokens; ``reshaped``, whether [N * T, d] is rounded.
    """
    g = Form()
    x = g.norm(g.op("Cast", "x", to=10))
    for _ in range(layers):
        read = g.op("Reshape", x, g.ints(-1, D)) if how.get("reshaped") else x
        read = g.rounded(read) if how["up"] != "fp16" else read
        y = g.linear(read, D, F, how.get("bias", True), how["up"])
        y = ACTIVATIONS[how.get("act", "gelu")](g, y)
        y = g.linear(y if how["down"] == "fp16" else g.rounded(y), F, D, kind=how["down"])
        y = g.op("Reshape", y, g.op("Shape", x)) if how.get("reshaped") else y
        x = g.norm(g.op("Add", read if how.get("residual") else x, y))
    return g.kernels(x, {"x": (1, ["N", "T", D])})


def by_erf(g: Form, x: str) -> str:
    half = g.op("Add", g.op("Erf", g.op("Mul", x, g.const(2**-0.5))), g.const(1.0))
    return g.op("Mul", g.op("Mul", x, half), g.const(0.5))


def by_tanh(g: Form, x: str) -> str:
    cubes = g.op("Mul", g.op("Mul", g.op("Mul", x, x), x), g.const(0.044715))
    tanh = g.op("Tanh", g.op("Mul", g.op("Add", x, cubes), g.const(0.79788)))
    return g.op("Mul", g.op("Mul", x, g.const(0.5)), g.op("Add", tanh, g.const(1.0)))


ACTIVATIONS: dict[str, Callable[[Form, str], str]] = {
    "gelu": lambda g, x: g.op("Gelu", x),
    "erf": by_erf,
    "tanh": by_tanh,
    "relu": lambda g, x: g.op("Relu", x),
    "none": lambda g, x: x,
}
#: Feed-forward layers alone.
ALONE: dict[str, dict[str, Any]] = {
    "both products in FP16": {"up": "fp16", "down": "fp16"},
    "first product in INT8": {"up": "output", "down": "fp16"},
    "second product in INT8": {"up": "fp16", "down": "output"},
    "both products in INT8": {"up": "output", "down": "output"},
    "first product in INT8, GELU by Erf": {"up": "output", "down": "fp16", "act": "erf"},
    "first product in INT8, GELU by Tanh": {"up": "output", "down": "fp16", "act": "tanh"},
    "first product in INT8, Relu": {"up": "output", "down": "fp16", "act": "relu"},
    "first product in INT8 without bias": {"up": "output", "down": "fp16", "bias": False},
    "first product in INT8 with one scale": {"up": "one", "down": "fp16"},
    "first product in INT8 with one scale, without bias": {"up": "one", "down": "fp16", "bias": False},
    "both in INT8 with one scale, Relu": {"up": "one", "down": "one", "act": "relu"},
    "first product in INT8 with one scale, nothing behind it": {
        "up": "one",
        "down": "fp16",
        "bias": False,
        "act": "none",
    },
    "first product in INT8, tokens rounded as [N * T, d]": {"up": "output", "down": "fp16", "reshaped": True},
    "first product in INT8, residual rounded": {"up": "output", "down": "fp16", "residual": True},
}
