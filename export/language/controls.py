"""Simple modules on the logits of a frozen language model, which a head of backward attention has to beat.

Each starts as the identity.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Temperature(nn.Module):
    """z / τ: one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.zeros(()))

    def forward(self, logits: Tensor) -> Tensor:
        """Return z' [N, V] for z [N, V]."""
        return logits / self.log_temperature.exp()


class VocabularyBias(nn.Module):
    """z + b: V parameters."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, logits: Tensor) -> Tensor:
        """Return z' [N, V] for z [N, V]."""
        return logits + self.bias


class HiddenModule(nn.Module):
    """A module that reads the last hidden states beside the logits: ``forward(logits, hidden)``."""


class LowRankAdapter(HiddenModule):
    """z + B A h for the last hidden state h [E], with A [d, E] and B [V, d]: d (V + E) parameters.

    As in LoRA (Hu et al. 2021, arXiv 2106.09685), A is random and B is 0 at the start.
    """

    def __init__(self, vocabulary: int, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, width) / math.sqrt(width))
        self.up = nn.Parameter(torch.zeros(vocabulary, rank))

    @staticmethod
    def rank_for(parameters: int, vocabulary: int, width: int) -> int:
        """Return the rank d of at least 1 whose number of parameters is closest to a given one."""
        return max(1, round(parameters / (vocabulary + width)))

    def forward(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """Return z' [N, V] for z [N, V] and h [N, E]."""
        return torch.addmm(logits, hidden @ self.down.T, self.up.T)


def revised_logits(module: nn.Module, logits: Tensor, hidden: Tensor) -> Tensor:
    """Return what a head or a control makes of logits [N, V], whose states are [N, E]."""
    both = (logits, hidden) if isinstance(module, HiddenModule) else (logits,)
    revised: Tensor = module(*both)
    return revised
