"""The base of the calculator's networks, which map tokens x [N, 15] float32 to a value [N, 1] float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edge.datatypes import Array
from export.models.attention import AdaptiveMode
from export.training.device import model_device


class Regressor(nn.Module):
    """Base of all calculator networks."""

    adaptive: AdaptiveMode | None = None

    def scored(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the value [N, 1], and the head scores [N, H] of each adaptive layer; here there are none."""
        return self(x), []

    def predict(self, tokens: Array) -> Array:
        """Return the values [N, 1] of tokens [N, 15], NumPy to NumPy, without gradients."""
        self.eval()
        with torch.no_grad():
            value: Tensor = self(torch.from_numpy(tokens).to(model_device(self)))
        return value.cpu().numpy()

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())


def glorot(module: nn.Module) -> None:
    """Initialise dense layers as Keras does, the library of the original; scorers start at full heads."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and ".scorer." not in name:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)


def sinusoids(length: int, dim: int) -> Tensor:
    """Return the positional encoding [length, dim] of Vaswani et al., 2017; with a single dimension it is sin(t)."""
    position = torch.arange(length)[:, None]
    frequency = 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
    both = torch.stack([torch.sin(position * frequency), torch.cos(position * frequency)], dim=-1)
    return both.flatten(1)[:, :dim]
