"""Training for INT8: products round their inputs and weights as the file for TensorRT does.

Gradients pass the rounding unchanged, and are zero where an input is clipped (straight-through). Ranges are those of a
calibration and stay fixed; the scales of weights follow the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from export.quantize.ranges import LEVELS, InputRange


class RoundedLinear(nn.Linear):
    """A linear layer whose input and weights are rounded to INT8, with sums in FP32.

    Attributes:
        largest: absolute value of the input, a scalar; larger ones are clipped.
    """

    largest: Tensor

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out_features] of x [..., in_features]."""
        scale, scales = _scale(self.largest), _scale(self.weight.detach().abs().amax(dim=1))
        zero, zeros = scale.new_zeros((), dtype=torch.int32), scales.new_zeros(len(scales), dtype=torch.int32)
        # QuantizeLinear keeps -128.
        inputs = torch.fake_quantize_per_tensor_affine(x.float(), scale, zero, -LEVELS - 1, LEVELS)
        weights = torch.fake_quantize_per_channel_affine(self.weight, scales, zeros, 0, -LEVELS, LEVELS)
        with torch.autocast(x.device.type, enabled=False):  # rounded values have more digits than BF16
            return functional.linear(inputs, weights, self.bias)


def round_products(model: nn.Module, largest: Mapping[str, float]) -> None:
    """Replace linear layers, by name, by ones that round to INT8, with these ranges of their inputs."""
    for name, limit in largest.items():
        rounded = _replaced(model, name, RoundedLinear)
        assert isinstance(rounded, RoundedLinear)
        rounded.largest.fill_(limit)


def unrounded(model: nn.Module) -> dict[str, float]:
    """Replace the layers of :func:`round_products` by plain ones with the same weights, and return their ranges."""
    largest = {name: float(layer.largest) for name, layer in rounded_products(model)}
    for name in largest:
        _replaced(model, name, nn.Linear)
    return largest


def trained_ranges(largest: Mapping[str, float]) -> dict[str, InputRange]:
    """Return the ranges of :func:`unrounded` for :func:`export.bundle.tier_files.static_int8`."""
    return {name: InputRange(limit) for name, limit in largest.items()}


def rounded_products(model: nn.Module) -> Iterator[tuple[str, RoundedLinear]]:
    """Yield the layers that round to INT8, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, RoundedLinear):
            yield name, module


def _replaced(model: nn.Module, name: str, kind: type[nn.Linear]) -> nn.Linear:
    old = model.get_submodule(name)
    assert isinstance(old, nn.Linear)
    with torch.device("meta"):
        new = kind(old.in_features, old.out_features)
    new.weight, new.bias = old.weight, old.bias
    if isinstance(new, RoundedLinear):
        new.largest = torch.ones((), device=old.weight.device)
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new)
    return new.train(old.training)


def _scale(largest: Tensor) -> Tensor:
    """Return the scales of :func:`export.quantize.ranges.scale_of` for a tensor."""
    scales = (largest / LEVELS).half().float()
    return torch.where(scales > 0, scales, 1.0)
