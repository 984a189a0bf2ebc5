"""The work of a transformer by the sizes of its layers: as in its file for TensorRT, which takes seconds to write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from export.estimate.work import ITEM_BYTES, Kernel, Work

if TYPE_CHECKING:
    from export.transformer import LayerShape, TransformerConfig

#: Kernels beside products and attentions, as :mod:`export.estimate.structure` counts them: three transpose queries,
#: keys and values, and one normalises; a feed-forward has one that normalises. Embeddings and task head have the rest.
_OTHERS_OF_ATTENTION, _OTHERS_OF_FEED_FORWARD = 4, 1
_OTHERS_AROUND_TEXT, _OTHERS_AROUND_IMAGE = 3, 2
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
        moved = ITEM_BYTES[_PRECISION] * batch * (tokens * config.dim + tokens + config.dim)
        mean = Kernel("product", 2e-9 * batch * tokens * config.dim, _PRECISION, batch, tokens, activation_bytes=moved)
        kernels.append(mean)
        others = _OTHERS_AROUND_TEXT
    for shape in config.layers:
        kernels += _layer(config.dim, shape, tokens, batch)
        others += _OTHERS_OF_ATTENTION * bool(shape.num_heads) + _OTHERS_OF_FEED_FORWARD * bool(shape.ffn_dim)
    return Work(tuple(kernels), others, batch)


def _layer(dim: int, shape: LayerShape, tokens: int, batch: int) -> list[Kernel]:
    rows, width = batch * tokens, shape.num_heads * shape.head_dim
    kernels = []
    if width:
        attention = Kernel("attention", 4e-9 * rows * tokens * width, _PRECISION, inner=shape.head_dim)
        kernels += [_product(rows, dim, 3 * width), attention, _product(rows, width, dim)]
    if shape.ffn_dim:
        kernels += [_product(rows, dim, shape.ffn_dim), _product(rows, shape.ffn_dim, dim)]
    return kernels


def _product(rows: int, inner: int, width: int, *, convolution: bool = False) -> Kernel:
    size = ITEM_BYTES[_PRECISION]
    return Kernel(
        "product",
        2e-9 * rows * inner * width,
        _PRECISION,
        rows,
        inner,
        convolution,
        weight_bytes=size * inner * width,
        activation_bytes=size * rows * (inner + width),
    )
