"""Graphs of random weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from edge.bundles.manifest import Profile
from export.estimate.model import kernels

D, H, R, F = 384, 12, 32, 1536
SIZES = (1, 1), (4, 64), (8, 128)


class Form:
    """A graph with random weights; tokens are [N, T, D]."""

    def __init__(self, **how: Any) -> None:
        self.how, self.nodes, self.constants, self.draw = how, [], [], np.random.default_rng(0)

    def op(self, operator: str, *inputs: str, outs: int = 1, **attributes: Any) -> Any:
        names = [f"t{len(self.nodes)}.{place}" for place in range(outs)]
        self.nodes.append(helper.make_node(operator, inputs, names, names[0], **attributes))
        return names[0] if outs == 1 else names

    def const(self, array: Any, kind: Any = np.float16) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(array, kind), f"c{len(self.constants)}"))
        return self.constants[-1].name

    def ints(self, *values: int) -> str:
        return self.const(values, np.int64)

    def weight(self, *shape: int) -> str:
        return self.const(self.draw.standard_normal(shape) / 20)

    def turn(self, x: str, *axes: int) -> str:
        return self.op("Transpose", x, perm=axes)

    def rounded(self, x: str) -> str:
        scale, zero = self.const(0.05), self.const(0, np.int8)
        return self.op("DequantizeLinear", self.op("QuantizeLinear", x, scale, zero), scale, zero)

    def weights(self, kind: str, inner: int, outer: int) -> str:
        """Return weights in ``fp16``, or in INT8 with a scale for each ``output``, or with ``one``."""
        if kind == "fp16":
            return self.weight(inner, outer)
        levels, sizes = self.const(self.draw.integers(-127, 128, (inner, outer)), np.int8), {"output": outer, "one": ()}
        scale, zero = self.const(np.full(sizes[kind], 1e-3)), self.const(np.zeros(sizes[kind]), np.int8)
        return self.op("DequantizeLinear", levels, scale, zero, **({"axis": 1} if kind == "output" else {}))

    def linear(self, x: str, inner: int, outer: int, bias: bool = True, kind: str = "fp16") -> str:
        y = self.op("MatMul", x, self.weights(kind, inner, outer))
        return self.op("Add", y, self.weight(outer)) if bias else y

    def norm(self, x: str) -> str:
        return self.op("LayerNormalization", x, self.weight(D), self.weight(D), axis=-1)

    def heads(self, x: str, heads: int = H, width: int = R) -> str:
        return self.turn(self.op("Reshape", x, self.ints(0, 0, heads, width)), 0, 2, 1, 3)

    def thirds(self, x: str, axis: int = 1, size: int = H) -> Any:
        return self.op("Split", x, self.ints(size, size, size), axis=axis, outs=3)

    def sizes(self, x: str, *last: int) -> str:
        """Return the shape [N, T, *last]."""
        both = self.op("Slice", self.op("Shape", x), self.ints(0), self.ints(2))
        return self.op("Concat", both, self.ints(*last), axis=0)

    def attention(self, q: str, k: str, v: str, mask: str, back: Sequence[int] = (0, 2, 1, 3), merged: str = "") -> str:
        """Return the sums [N, T, H * R] of queries, keys and values [N, H, T, R], or in another order."""
        rounded, out = self.how.get("attention") == "int8", self.how.get("rounded", "after")
        q, k, v = (self.rounded(one) for one in (q, k, v)) if rounded else (q, k, v)
        y = self.op("Add", self.op("MatMul", q, self.turn(k, 0, 1, 3, 2)), mask)
        y = self.op("Cast", self.op("Softmax", self.op("Cast", y, to=1), axis=-1), to=10)
        y = self.op("MatMul", self.rounded(y) if rounded else y, v)
        y = self.turn(self.rounded(y) if out == "before" else y, *back)
        y = self.rounded(y) if out == "between" else y
        return self.op("Reshape", y, merged or self.ints(0, 0, H * R))

    def mask(self) -> str:
        kept = self.op("Unsqueeze", self.op("Cast", "mask", to=10), self.ints(1, 2))
        return self.op("Mul", self.op("Sub", self.const(1.0), kept), self.const(-1e4))

    def kernels(self, y: str, inputs: dict[str, tuple[int, list[Any]]]) -> int:
        """Return the kernels of an engine that reads inputs of these types and shapes."""
        self.nodes.append(helper.make_node("Cast", [y], ["y"], to=1))
        graph = helper.make_graph(
            self.nodes,
            "form",
            [helper.make_tensor_value_info(name, *spec) for name, spec in inputs.items()],
            [helper.make_tensor_value_info("y", 1, None)],
            self.constants,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
        rest = {name: shape[2:] for name, (_, shape) in inputs.items()}
        profile = {name: Profile(*((*size, *rest[name]) for size in SIZES)) for name in inputs}
        found = kernels(model.SerializeToString(), profile)
        assert found is not None, "TensorRT-RTX is not installed, or rejects the graph"
        return len(found)
