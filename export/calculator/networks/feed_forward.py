"""Feed-forward networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from export.papers.calculator.networks import InputEncoding, Padding, Regressor, Tokens, glorot

Activation = Literal["prelu", "relu", "gelu", "silu", "tanh"]


class FeedForward(Regressor):
    """Dense layers with an activation between them: FNN2, FNN3 and the baseline of papers 000 and 001.

    Args:
        units: width of each hidden layer.
        activation: after each hidden layer. PReLU has a slope for each unit, which starts at 0, as in Keras.
        dropout: the share of units that each hidden layer drops in training.
        positional_encoding, tokens, padding, random_offset, embedding: of :class:`InputEncoding`.
    """

    def __init__(
        self,
        units: Sequence[int] = (345,),
        activation: Activation = "prelu",
        dropout: float = 0.0,
        positional_encoding: bool = False,
        tokens: Tokens = "paper",
        padding: Padding = "half",
        random_offset: bool = False,
        embedding: int = 0,
    ) -> None:
        super().__init__()
        self.encoding = InputEncoding(positional_encoding, tokens, padding, random_offset, embedding)
        layers: list[nn.Module] = []
        width = self.encoding.width
        for count in units:
            layers += [nn.Linear(width, count), _activation(activation, count)]
            if dropout:
                layers.append(nn.Dropout(dropout))
            width = count
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))
        glorot(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the value."""
        value: Tensor = self.layers(self.encoding(x))
        return value


def _activation(name: Activation, units: int) -> nn.Module:
    if name == "prelu":
        return nn.PReLU(units, init=0.0)
    others: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}
    return others[name]()
