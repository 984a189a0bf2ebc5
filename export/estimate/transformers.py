"""The work of a transformer by the sizes of its layers: as in its file for TensorRT, which takes seconds to write."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from export.estimate.work import ITEM_BYTES, Kernel, Work

if TYPE_CHECKING:
    from export.models.transformer import LayerShape, TransformerConfig

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
    kernels = [_product(batch, config.dim, outputs)]
    if config.patch_size:
        values = config.channels * config.patch_size**2
        kernels.append(_product(batch * (tokens - 1), values, config.dim, convolution=True))
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

    def product(name: str, inner: int, outer: int) -> Kernel:
        behind = first_tokens and name in ("up", "down")
        return _product(batch if behind else rows, inner, outer, "fp16" if name in fp16 else precision)

    kernels = []
    if shape.num_heads:
        inner = min(shape.head_dim, tokens)
        attention = Kernel("attention", 4e-9 * rows * tokens * width, _PRECISION, inner=inner)
        kernels += [product("q_proj", dim, 3 * width), attention, product("output_proj", width, dim)]
    if shape.ffn_dim:
        kernels += [product("up", dim, shape.ffn_dim), product("down", shape.ffn_dim, dim)]
    return kernels


def _product(rows: int, inner: int, width: int, precision: str = _PRECISION, *, convolution: bool = False) -> Kernel:
    size = ITEM_BYTES[precision]
    return Kernel(
        "product",
        2e-9 * rows * inner * width,
        precision,
        rows,
        inner,
        convolution,
        weight_bytes=size * inner * width,
        activation_bytes=size * rows * (inner + width),
    )
