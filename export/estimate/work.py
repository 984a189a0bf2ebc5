"""The work of one run of a model, kernel by kernel: what a prediction starts from."""

from __future__ import annotations

from collections.abc import Container
from functools import cached_property
from math import ceil
from statistics import median
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from export.models.transformer import LayerShape, TransformerConfig


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
        totals: dict[str, float] = {}
        for kernel in self.kernels:
            if kernel.gflop:
                totals[kernel.precision] = totals.get(kernel.precision, 0.0) + kernel.gflop
        return totals

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of products; of an embedding, a run reads a few rows only."""
        return sum(kernel.weight_bytes for kernel in self.kernels)

    @cached_property
    def other(self) -> Kernel:
        """Each of the further kernels."""
        read = [kernel.rows * kernel.inner for kernel in self.kernels if kernel.kind == "product"]
        return Kernel("other", activation_bytes=int(4 * median(read)) if read else 0)


#: Kernels beside products and attentions, as :mod:`export.estimate.structure` counts them in FP16: a half of a layer
#: has the sum and normalisation behind it, and embeddings and task head have the rest.
_OTHERS_OF_A_HALF, _OTHERS_AROUND_TEXT, _OTHERS_AROUND_IMAGE = 1, 4, 2
#: Heads that :mod:`export.bundle.fewest_kernels` makes of a single one.
_LEAST_HEADS = 2
_PRECISION = "fp16"


def transformer_work(config: TransformerConfig, tokens: int, batch: int, outputs: int = 1) -> Work:
    """Return the work of one run in FP16, with a task head that takes the mean of texts or the first token of images.

    Args:
        tokens: of each row; of images ``config.max_positions``.
        outputs: of the task head, for each row.
    """
    kernels = [product(batch, config.dim, outputs)]
    if config.patch_size:
        values, patches = config.channels * config.patch_size**2, batch * (tokens - 1)
        kernels.append(product(patches, values, config.dim, convolved=patches * values))
        others = _OTHERS_AROUND_IMAGE
    else:
        others = _OTHERS_AROUND_TEXT
    for shape in config.layers:
        kernels += layer_kernels(config.dim, shape, tokens, batch)
        others += _OTHERS_OF_A_HALF * (bool(shape.num_heads) + bool(shape.ffn_dim))
    return Work(tuple(kernels), others, batch)


def layer_kernels(
    dim: int,
    shape: LayerShape,
    tokens: int,
    batch: int,
    precision: str = _PRECISION,
    fp16: Container[str] = (),
    *,
    first_tokens: bool = False,
) -> list[Kernel]:
    """Return the products and the attention of one layer, as in its file for TensorRT.

    Args:
        precision: of the products, but for those whose names are in ``fp16``.
        first_tokens: whether the feed-forward computes only the first token of each row.
    """
    rows, width = batch * tokens, max(shape.num_heads, _LEAST_HEADS) * shape.head_dim

    def named(name: str, inner: int, outer: int) -> Kernel:
        behind = first_tokens and name in ("up", "down")
        return product(batch if behind else rows, inner, outer, "fp16" if name in fp16 else precision)

    kernels = []
    if shape.num_heads:
        inner = min(shape.head_dim, tokens)
        attention = Kernel("attention", 4e-9 * rows * tokens * width, _PRECISION, inner=inner)
        kernels += [named("q_proj", dim, 3 * width), attention, named("output_proj", width, dim)]
    if shape.ffn_dim:
        kernels += [named("up", dim, shape.ffn_dim), named("down", shape.ffn_dim, dim)]
    return kernels


def product(rows: int, inner: int, width: int, precision: str = _PRECISION, convolved: int = 0) -> Kernel:
    """Return the kernel of a matrix product, or of a convolution that reads so many values."""
    size = ITEM_BYTES[precision]
    return Kernel(
        "product",
        2e-9 * rows * inner * width,
        precision,
        rows,
        inner,
        bool(convolved),
        weight_bytes=size * inner * width,
        activation_bytes=size * ((convolved or rows * inner) + rows * width),
    )
