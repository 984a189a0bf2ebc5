"""The work of one run of a model, kernel by kernel: what a prediction starts from."""

from __future__ import annotations

from functools import cached_property
from math import ceil
from statistics import median
from typing import Literal

import msgspec

#: Bytes of an activation or weight by precision.
ITEM_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}
#: TensorRT computes the rows of a product in tiles: 64 is the smallest common height of its FP16 kernels for Ampere.
_TILE_ROWS = 64


class Kernel(msgspec.Struct, frozen=True):
    """One kernel of an engine.

    Attributes:
        kind: a matrix product or convolution; a fused attention, from logits to weighted values; or anything else.
        gflop: 10⁹ operations of its products; an addition is one.
        precision: of the products.
        rows: of a product's result, those of all sequences of a batch.
        inner: terms of each sum: the width of the rows that a product reads, or of a head.
        convolution: whether the product is one.
        weight_bytes: that a run reads.
        activation_bytes: that a run reads and writes.
    """

    kind: Literal["product", "attention", "other"]
    gflop: float = 0.0
    precision: str = "fp16"
    rows: int = 0
    inner: int = 0
    convolution: bool = False
    weight_bytes: int = 0
    activation_bytes: int = 0

    @property
    def used_rows(self) -> float:
        """The share of the computed rows that a result has: 197 rows in 4 tiles of 64 are 0.77."""
        return self.rows / (_TILE_ROWS * ceil(self.rows / _TILE_ROWS)) if self.rows else 1.0


class Work(msgspec.Struct, frozen=True, dict=True):
    """The work of one run.

    Attributes:
        kernels: products and attentions, and other kernels whose bytes are known.
        others: further kernels, each of which reads and writes as much as a typical product reads.
        batch: rows of the inputs.
    """

    kernels: tuple[Kernel, ...]
    others: int
    batch: int = 1

    @cached_property
    def gflop(self) -> dict[str, float]:
        """10⁹ operations by precision, attention's and recurrent layers' too."""
        found: dict[str, float] = {}
        for kernel in self.kernels:
            if kernel.gflop:
                found[kernel.precision] = found.get(kernel.precision, 0.0) + kernel.gflop
        return found

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of products; of an embedding, a run reads a few rows only."""
        return sum(kernel.weight_bytes for kernel in self.kernels)

    @cached_property
    def other(self) -> Kernel:
        """Each of the further kernels."""
        read = [kernel.rows * kernel.inner for kernel in self.kernels if kernel.kind == "product"]
        return Kernel("other", activation_bytes=int(4 * median(read)) if read else 0)
