"""The calculator's networks. All map tokens x [N, 15] float32 to a value [N, 1] float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from edge.bundles.expression import MAX_TERMS, TOKENS
from edge.datatypes import Array
from export.attention import AdaptiveMode, MultiHeadAttention
from export.training.device import model_device

#: The largest operand that the oracle answers for, and its M. A power of two, so that TF32 and FP16 hold it and
#: every first-layer sum of whole operands (at most 2,048 in size) exactly. In FP32 whole operands give exact values;
#: others are rounded to multiples of 2**-13.
ORACLE_MAX_OPERAND = 1024


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


class Oracle(Regressor):
    """One hidden ReLU layer of 30 units that is exact by construction, without training.

    The first operand a is relu(a) - relu(-a). A term (o, x), operator before operand, is, for |x| <= M,

        relu(x + Mo - M) - relu(-x + Mo - M) - relu(x - Mo) + relu(-x - Mo)

    which is x for o = 1, -x for o = 0, and 0 for padding (o = x = 0.5), where the four cancel in pairs.
    """

    def __init__(self) -> None:
        super().__init__()
        big = float(ORACLE_MAX_OPERAND)
        units = 2 + 4 * (MAX_TERMS - 1)
        self.hidden = nn.Linear(TOKENS, units)
        self.output = nn.Linear(units, 1)
        weight, bias = torch.zeros(units, TOKENS), torch.zeros(units)
        sign = torch.zeros(1, units)
        weight[:2, 0] = sign[0, :2] = torch.tensor([1.0, -1.0])
        for term in range(1, MAX_TERMS):
            four = slice(4 * term - 2, 4 * term + 2)
            weight[four, 2 * term] = torch.tensor([1.0, -1.0, 1.0, -1.0])
            weight[four, 2 * term - 1] = torch.tensor([big, big, -big, -big])
            bias[four] = torch.tensor([-big, -big, 0.0, 0.0])
            sign[0, four] = torch.tensor([1.0, -1.0, -1.0, 1.0])
        self.load_state_dict(
            {"hidden.weight": weight, "hidden.bias": bias, "output.weight": sign, "output.bias": torch.zeros(1)}
        )
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the value."""
        value: Tensor = self.output(functional.relu(self.hidden(x)))
        return value


class Fnn2(Regressor):
    """The FNN2 of paper 000: one hidden layer of 345 PReLU units, 6,211 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(TOKENS, 345), nn.PReLU(345, init=0.0), nn.Linear(345, 1))
        _glorot(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the value."""
        value: Tensor = self.layers(x)
        return value


class Gate(Regressor):
    """Attention with signed weights: each term's operator gates its operand; 51 parameters.

    It is the "FNN with attention" that paper 000 proposes. Summing gated terms and skipping padding build the additive
    structure in: it shows which inductive bias the other networks miss, not that a net finds the rule.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1), nn.Tanh())
        self.value = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the value."""
        # The first operand has no operator; it counts as added, which is 1.0.
        operators = functional.pad(x, (1, 0), value=1.0)[:, ::2, None]  # [N, 8, 1]
        operands = x[:, ::2, None]  # [N, 8, 1]
        real = (2 * operators - 1).square()  # 1 for the operators 1.0 and 0.0, 0 for padding 0.5
        terms: Tensor = real * self.gate(operators) * self.value(operands)
        return terms.sum(dim=1)


class EncoderLayer(nn.Module):
    """A post-LN transformer encoder layer: attention, then two linear layers with a ReLU between."""

    def __init__(self, dim: int, num_heads: int, hidden: int, adaptive: AdaptiveMode | None) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(dim, num_heads, dim // num_heads, adaptive)
        self.attention_norm = nn.LayerNorm(dim, eps=1e-3)  # Keras' epsilon, as in the original
        self.feed_forward = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        self.feed_forward_norm = nn.LayerNorm(dim, eps=1e-3)

    def forward(self, x: Tensor, queries: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the first ``queries`` tokens (None: all), [N, queries, dim], and the head scores [N, H] or None."""
        attended, scores = self.attention(x, queries=queries)
        x = self.attention_norm(x[:, :queries] + attended)
        return self.feed_forward_norm(x + self.feed_forward(x)), scores


class Transformer4(Regressor):
    """The transformer4 of paper 000: 3 layers of 8 heads of width 4; 38,209 parameters without scorers.

    Args:
        adaptive: how heads shrink (paper 002); None is the network of paper 000.
    """

    def __init__(self, adaptive: AdaptiveMode | None = None) -> None:
        super().__init__()
        self.adaptive = adaptive
        dim = 32
        self.embedding = nn.Linear(1, dim)
        self.layers = nn.ModuleList(EncoderLayer(dim, 8, 128, adaptive) for _ in range(3))
        self.output = nn.Linear(dim, 1)
        self.positions: Tensor
        self.register_buffer("positions", _sinusoids(TOKENS + 1, dim), persistent=False)
        _glorot(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the value."""
        return self.scored(x)[0]

    def scored(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the value [N, 1], and the head scores [N, 8] of each layer if it is adaptive."""
        x = functional.pad(x, (1, 0), value=15.0)[:, :, None]  # the summary token's value; [N, 16, 1]
        x = self.embedding(x) * math.sqrt(self.embedding.out_features) + self.positions  # [N, 16, 32]
        scores = []
        for index, layer in enumerate(self.layers, start=1):
            # Only the summary token is read in the end, so the last layer computes no other.
            x, layer_scores = layer(x, queries=1 if index == len(self.layers) else None)
            if layer_scores is not None:
                scores.append(layer_scores)
        return self.output(x[:, 0]), scores

    def kept(self, scores: list[Tensor]) -> Tensor:
        """Return which head coordinates each layer uses, [layers, N, H, d_k] of 0 and 1, for its scores."""
        attentions = [module for module in self.modules() if isinstance(module, MultiHeadAttention)]
        return torch.stack(
            [attention.keep(layer_scores) for attention, layer_scores in zip(attentions, scores, strict=True)]
        )


MODELS: dict[str, Callable[..., Regressor]] = {
    "calculator-oracle": Oracle,
    "calculator-gate": Gate,
    "calculator-fnn2": Fnn2,
    "calculator-transformer4": Transformer4,
}


def create(name: str, seed: int, **arguments: Any) -> Regressor:
    """Return an untrained network whose initial weights depend on ``seed`` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name](**arguments)


def _glorot(module: nn.Module) -> None:
    # Keras' initialisation of dense layers, as in the original. Scorers keep theirs: they start at full heads.
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and ".scorer." not in name:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)


def _sinusoids(length: int, dim: int) -> Tensor:
    """Return the positional encoding [length, dim] of Vaswani et al., 2017."""
    position = torch.arange(length)[:, None]
    frequency = 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
    return torch.stack([torch.sin(position * frequency), torch.cos(position * frequency)], dim=-1).flatten(1)
