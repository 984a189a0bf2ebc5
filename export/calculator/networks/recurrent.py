"""Recurrent networks. Training runs their equations step by step; ONNX gets its own operators RNN, LSTM and GRU."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from edge.bundles.expression import TOKENS
from export.papers.calculator.networks import Regressor, glorot

Cell = Literal["RNN", "LSTM", "GRU"]
#: The gates of a cell, in ONNX's order of their weights.
_GATES = {"RNN": "h", "LSTM": "iofc", "GRU": "zrh"}


class Recurrent(nn.Module):
    """A recurrent layer with one bias for each gate, as in the papers and Keras; torch's own layers have two.

    RNN is paper 000's section 1.1 with tanh, LSTM its equations 1 to 6, GRU its equations 7 to 10: there the reset gate
    acts on the state before the product, and z weights the *new* state. ONNX's GRU gives z to the old state, so its
    weights are negated in the graph.

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
        # Keras' initialisation, as in the original: the kernel of all gates is one matrix there.
        for direction in range(self.directions):
            nn.init.xavier_uniform_(self.input_weight.data[direction])
            nn.init.orthogonal_(self.state_weight.data[direction])
        if cell == "LSTM":
            nn.init.ones_(self.bias.data[:, 2 * units : 3 * units])  # that of the forget gate

    def forward(self, x: Tensor) -> Tensor:
        """Return the states [N, T, directions * units] of tokens [N, T, inputs]."""
        if torch.onnx.is_in_onnx_export():
            return self._operator(x)
        both = [self._states(x, 0)]
        if self.directions == 2:
            both.append(self._states(x.flip(1), 1).flip(1))
        return torch.cat(both, dim=2)

    def _states(self, x: Tensor, direction: int) -> Tensor:
        inputs = (x @ self.input_weight[direction].T + self.bias[direction]).unbind(1)  # T of [N, gates * units]
        weight = self.state_weight[direction]
        state = memory = x.new_zeros(len(x), self.units)
        states = []
        for one in inputs:
            if self.cell == "RNN":
                state = torch.tanh(torch.addmm(one, state, weight.T))
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
        return self.attended(x)[0]

    def attended(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the value [N, 1], and the attention of each token, [N, 15]."""
        states = self.recurrent(x[:, :, None])  # [N, 15, width]
        attention = torch.softmax(torch.tanh(self.projection(states)) @ self.context, dim=1)
        value: Tensor = self.output((attention[:, :, None] * states).sum(dim=1))
        return value, attention
