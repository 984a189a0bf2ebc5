"""The calculator's networks, by the names of their bundles; shapes are in :mod:`export.papers.calculator.specs`.

Training runs the equations of recurrent networks step by step; ONNX gets its own operators RNN, LSTM and GRU. It
has none for a recurrence with a PReLU, whose steps it gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from edge.bundles.expression import MAX_TERMS, TOKENS
from edge.datatypes import Array
from export.models.attention import MultiHeadAttention
from export.papers.calculator.specs import SPECS
from export.training.device import model_device

Cell = Literal["RNN", "PReLU", "LSTM", "GRU"]
#: The gates of a cell, in ONNX's order of their weights.
_GATES = {"RNN": "h", "PReLU": "h", "LSTM": "iofc", "GRU": "zrh"}


class Regressor(nn.Module):
    """Base of all networks, which map tokens x [N, 15] float32 to a value [N, 1] float32."""

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
    """Initialise dense layers as Keras does, the library of the original."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)


def sinusoids(length: int, dim: int) -> Tensor:
    """Return the positional encoding [length, dim] of Vaswani et al., 2017; with a single dimension it is sin(t)."""
    position = torch.arange(length)[:, None]
    frequency = 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
    both = torch.stack([torch.sin(position * frequency), torch.cos(position * frequency)], dim=-1)
    return both.flatten(1)[:, :dim]


class Oracle(Regressor):
    """One hidden ReLU layer of 30 units that is exact by construction, without training.

    The first operand a is relu(a) - relu(-a). A term (o, x), operator before operand, is, for |x| <= M,

        relu(x + Mo - M) - relu(-x + Mo - M) - relu(x - Mo) + relu(-x - Mo)

    which is x for o = 1, -x for o = 0, and 0 for padding (o = x = 0.5), where the four cancel in pairs.

    Args:
        max_operand: M. A power of two, so that TF32 and FP16 hold it and every first-layer sum of whole operands (at
            most 2 M in size) exactly. In FP32 whole operands give exact values; with M = 1,024, others are rounded to
            multiples of 2**-13.
    """

    def __init__(self, max_operand: int = 1024) -> None:
        super().__init__()
        big = float(max_operand)
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


class FeedForward(Regressor):
    """Dense layers with PReLUs between them: FNN2, FNN3 and the baseline of papers 000 and 001.

    Args:
        units: width of each hidden layer. A PReLU has a slope for each unit, which starts at 0, as in Keras.
        positional_encoding: whether sin(t) is added to the token at position t, as FNN3 has it.
    """

    def __init__(self, units: Sequence[int] = (345,), positional_encoding: bool = False) -> None:
        super().__init__()
        self.positions: Tensor | None
        positions = sinusoids(TOKENS, 1)[:, 0] if positional_encoding else None
        self.register_buffer("positions", positions, persistent=False)
        layers: list[nn.Module] = []
        for inputs, count in zip((TOKENS, *units), units, strict=False):
            layers += [nn.Linear(inputs, count), nn.PReLU(count, init=0.0)]
        self.layers = nn.Sequential(*layers, nn.Linear(units[-1], 1))
        glorot(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the value."""
        value: Tensor = self.layers(x if self.positions is None else x + self.positions)
        return value


class Gate(Regressor):
    """Attention with signed weights: each term's operator gates its operand.

    It is the "FNN with attention" that paper 000 proposes. Summing gated terms and skipping padding build the additive
    structure in: it shows which inductive bias the other networks miss, not that a net finds the rule.

    Args:
        hidden: width of the gate's hidden layer.
        pooling: ``sum`` adds the gated terms; ``softmax`` weights them with attention that is at most 1 in all, and
            multiplies by their number.
    """

    def __init__(self, hidden: int = 16, pooling: Literal["sum", "softmax"] = "sum") -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1), nn.Tanh())
        self.value = nn.Linear(1, 1)
        self.score = _two_layers(2, hidden) if pooling == "softmax" else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the value."""
        operators, operands, real = _terms(x)
        gated: Tensor = real * self.gate(operators) * self.value(operands)
        if self.score is None:
            return gated.sum(dim=1)
        logits = self.score(torch.cat([operators, operands], dim=2))
        weights = torch.softmax(torch.where(real > 0, logits, -math.inf), dim=1)
        return real.sum(dim=1) * (weights * gated).sum(dim=1)


class TermNetwork(Regressor):
    """One network for every term, and the sum of its outputs: no product of operator and operand is built in.

    Args:
        hidden: width of its hidden layer.
    """

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.term = _two_layers(2, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the value."""
        operators, operands, real = _terms(x)
        value: Tensor = (real * self.term(torch.cat([operators, operands], dim=2))).sum(dim=1)
        return value


def _terms(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return operators and operands, and 1 for terms and 0 for padding, [N, 8, 1] each, of tokens [N, 15]."""
    # The first operand has no operator; it counts as added, which is 1.0.
    operators = functional.pad(x, (1, 0), value=1.0)[:, ::2, None]
    real = (2 * operators - 1).square()  # 1 for the operators 1.0 and 0.0, 0 for padding 0.5
    return operators, x[:, ::2, None], real


def _two_layers(inputs: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 1))


class Recurrent(nn.Module):
    """A recurrent layer with one bias for each gate, as in the papers and Keras; torch's own layers have two.

    PReLU is paper 000's section 1.1, RNN the same with tanh, LSTM its equations 1 to 6, GRU its equations 7 to 10:
    there the reset gate acts on the state before the product, and z weights the *new* state. ONNX's GRU gives z to the
    old state, so its weights are negated in the graph.

    Args:
        inputs: features of a token.
        units: features of the state.
        bidirectional: whether a second layer reads from the last token to the first.
    """

    def __init__(self, cell: Cell, inputs: int, units: int, bidirectional: bool = False) -> None:
        super().__init__()
        self.cell, self.units, self.directions = cell, units, 2 if bidirectional else 1
        gates = len(_GATES[cell])
        self.input_weight = nn.Parameter(torch.empty(self.directions, gates * units, inputs))
        self.state_weight = nn.Parameter(torch.empty(self.directions, gates * units, units))
        self.bias = nn.Parameter(torch.zeros(self.directions, gates * units))
        #: Of the PReLU, for each unit; they start at 0, as in Keras.
        self.slopes = nn.Parameter(torch.zeros(self.directions, units)) if cell == "PReLU" else None
        # Keras' initialisation, as in the original: the kernel of all gates is one matrix there.
        for direction in range(self.directions):
            nn.init.xavier_uniform_(self.input_weight.data[direction])
            nn.init.orthogonal_(self.state_weight.data[direction])
        if cell == "LSTM":
            nn.init.ones_(self.bias.data[:, 2 * units : 3 * units])  # that of the forget gate

    def forward(self, x: Tensor) -> Tensor:
        """Return the states [N, T, directions * units] of tokens [N, T, inputs]."""
        if self.slopes is None and torch.onnx.is_in_onnx_export():
            return self._operator(x)
        both = [self._states(x, 0)]
        if self.directions == 2:
            both.append(self._states(x.flip(1), 1).flip(1))
        return torch.cat(both, dim=2)

    def _states(self, x: Tensor, direction: int) -> Tensor:
        inputs = (x @ self.input_weight[direction].T + self.bias[direction]).unbind(1)  # T of [N, gates * units]
        weight = self.state_weight[direction]
        state = memory = x.new_zeros(x.shape[0], self.units)
        states = []
        for one in inputs:
            if self.cell == "RNN":
                state = torch.tanh(torch.addmm(one, state, weight.T))
            elif self.slopes is not None:
                state = functional.prelu(torch.addmm(one, state, weight.T), self.slopes[direction])
            elif self.cell == "LSTM":
                i, o, f, c = torch.addmm(one, state, weight.T).chunk(4, dim=1)
                memory = torch.sigmoid(f) * memory + torch.sigmoid(i) * torch.tanh(c)
                state = torch.sigmoid(o) * torch.tanh(memory)
            else:
                both, new = 2 * self.units, one[:, 2 * self.units :]
                z, r = torch.sigmoid(torch.addmm(one[:, :both], state, weight[:both].T)).chunk(2, dim=1)
                state = (1 - z) * state + z * torch.tanh(torch.addmm(new, r * state, weight[both:].T))
            states.append(state)
        return torch.stack(states, dim=1)

    def _operator(self, x: Tensor) -> Tensor:
        sign = torch.ones_like(self.bias)
        if self.cell == "GRU":
            sign[:, : self.units] = -1.0
        weights = [sign[:, :, None] * self.input_weight, sign[:, :, None] * self.state_weight]
        bias = torch.cat([sign * self.bias, torch.zeros_like(self.bias)], dim=1)  # ONNX has two
        direction = "bidirectional" if self.directions == 2 else "forward"
        states = torch.onnx.ops.symbolic(
            self.cell,
            (x.transpose(0, 1), *weights, bias),
            {"hidden_size": self.units, "direction": direction},
            dtype=x.dtype,
            shape=(x.shape[1], self.directions, x.shape[0], self.units),
            version=14,
        )
        return states.permute(2, 0, 1, 3).flatten(2)  # from [T, directions, N, units]


class Rnn(Regressor):
    """The RNN2 of papers 000 and 001: two recurrent tanh layers, each with PReLUs after it.

    Args:
        units: of each layer.
    """

    def __init__(self, units: int = 269) -> None:
        super().__init__()
        self.first, self.second = Recurrent("RNN", 1, units), Recurrent("RNN", units, units)
        # A slope for each unit at each position; torch's PReLU has one for each channel only.
        self.slopes = nn.Parameter(torch.zeros(TOKENS, units))
        self.activation = nn.PReLU(units, init=0.0)
        self.output = nn.Linear(units, 1)
        glorot(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the value."""
        states = self.first(x[:, :, None])  # [N, 15, units]
        states = torch.relu(states) - self.slopes * torch.relu(-states)
        value: Tensor = self.output(self.activation(self.second(states)[:, -1]))
        return value


class PreluRnn(Regressor):
    """The RNN of paper 000's section 1.1, in two layers as RNN2: a PReLU within the recurrence takes the place of tanh.

    Args:
        units: of each layer.
    """

    def __init__(self, units: int = 269) -> None:
        super().__init__()
        self.layers = nn.Sequential(Recurrent("PReLU", 1, units), Recurrent("PReLU", units, units))
        self.output = nn.Linear(units, 1)
        glorot(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the value, which the last state has."""
        value: Tensor = self.output(self.layers(x[:, :, None])[:, -1])
        return value


class AttentiveRecurrent(Regressor):
    """A recurrent layer, and attention over its states: paper 000's equations 11 to 14.

    Args:
        units: of each direction.
        bidirectional: as the paper's text has it; the network behind its table reads in one direction.
    """

    def __init__(self, cell: Cell, units: int, bidirectional: bool = False) -> None:
        super().__init__()
        self.recurrent = Recurrent(cell, 1, units, bidirectional)
        width = units * self.recurrent.directions
        self.projection = nn.Linear(width, width)
        self.context = nn.Parameter(torch.empty(width))
        self.output = nn.Linear(width, 1)
        glorot(self)
        nn.init.xavier_uniform_(self.context.data[:, None])

    def forward(self, x: Tensor) -> Tensor:
        """Return the value."""
        states = self.recurrent(x[:, :, None])  # [N, 15, width]
        attention = torch.softmax(torch.tanh(self.projection(states)) @ self.context, dim=1)
        value: Tensor = self.output((attention[:, :, None] * states).sum(dim=1))
        return value


class EncoderLayer(nn.Module):
    """A post-LN transformer encoder layer: attention, then two linear layers with a ReLU between."""

    def __init__(self, dim: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(dim, num_heads, dim // num_heads)
        self.attention_norm = nn.LayerNorm(dim, eps=1e-3)  # Keras' epsilon, as in the original
        self.feed_forward = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        self.feed_forward_norm = nn.LayerNorm(dim, eps=1e-3)

    def forward(self, x: Tensor, queries: int | None = None) -> Tensor:
        """Return the first ``queries`` tokens (None: all), [N, queries, dim]."""
        x = self.attention_norm(x[:, :queries] + self.attention(x, queries=queries))
        encoded: Tensor = self.feed_forward_norm(x + self.feed_forward(x))
        return encoded


class Transformer(Regressor):
    """The transformers of papers 000 and 001: an encoder that reads the value from a token before the expression.

    Args:
        dim: features of a token, d.
        num_layers: of the encoder.
        num_heads: of each layer; a head has d / num_heads features.
        hidden: width of the feed-forward networks.
    """

    def __init__(self, dim: int, num_layers: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, dim)
        self.layers = nn.ModuleList(EncoderLayer(dim, num_heads, hidden) for _ in range(num_layers))
        self.output = nn.Linear(dim, 1)
        self.positions: Tensor
        self.register_buffer("positions", sinusoids(TOKENS + 1, dim), persistent=False)
        glorot(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the value."""
        x = functional.pad(x, (1, 0), value=15.0)[:, :, None]  # the summary token's value; [N, 16, 1]
        x = self.embedding(x) * math.sqrt(self.embedding.out_features) + self.positions  # [N, 16, d]
        for index, layer in enumerate(self.layers, start=1):
            # Only the summary token is read in the end, so the last layer computes no other.
            x = layer(x, queries=1 if index == len(self.layers) else None)
        value: Tensor = self.output(x[:, 0])
        return value


_CLASSES = (Oracle, Gate, TermNetwork, FeedForward, Rnn, PreluRnn, AttentiveRecurrent, Transformer)
_BY_NAME = {network.__name__: network for network in _CLASSES}
#: Functions that return an untrained network; they accept other arguments than those of the spec.
NETWORKS: dict[str, Callable[..., Regressor]] = {
    name: partial(_BY_NAME[spec.network], **spec.arguments) for name, spec in SPECS.items()
}


def create(name: str, seed: int, **arguments: Any) -> Regressor:
    """Return an untrained network whose initial weights depend on ``seed`` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NETWORKS[name](**arguments)
