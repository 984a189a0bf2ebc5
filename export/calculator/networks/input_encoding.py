"""How a network sees the tokens of a bundle: other codes, padding, places and embeddings, made inside of it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from edge.bundles.expression import MAX_TERMS, PADDING, TOKENS
from export.papers.calculator.networks import sinusoids, terms

Tokens = Literal["paper", "centred", "triples"]
Padding = Literal["half", "zeros"]


class InputEncoding(nn.Module):
    """Maps tokens x [N, 15] to the features [N, width] of a dense layer. The input of a bundle stays the same.

    Args:
        positional_encoding: whether sin(t) is added to the token at position t, as FNN3 has it.
        tokens: ``paper`` keeps operands, and operators of 1 and 0; ``centred`` makes the operators 0.75 and 0.25, so
            that they differ from the operands 1 and 0; ``triples`` gives (sign, operand, 1) for each term and (0, 0, 0)
            for padding, 24 tokens.
        padding: ``half`` is paper 000's 0.5; ``zeros`` is 0, so that an expression seems to end with ``- 0``. Triples
            have their own.
        random_offset: whether an expression starts at a random term in training; in use it starts at the first.
        embedding: size of a learnt embedding, tanh of a linear map, which all tokens share; 0 is without.
    """

    def __init__(
        self,
        positional_encoding: bool = False,
        tokens: Tokens = "paper",
        padding: Padding = "half",
        random_offset: bool = False,
        embedding: int = 0,
    ) -> None:
        super().__init__()
        self._tokens, self._padding, self._random_offset = tokens, padding, random_offset
        places = 3 * MAX_TERMS if tokens == "triples" else TOKENS
        self.width = places * (embedding or 1)
        self.positions: Tensor | None
        self.register_buffer("positions", sinusoids(places, 1)[:, 0] if positional_encoding else None, persistent=False)
        self.embedding = nn.Linear(1, embedding) if embedding else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        if self._random_offset and self.training:
            x = _moved(x)
        if self._tokens == "triples":
            operators, operands, real = terms(x)
            x = torch.cat([real * (2 * operators - 1), real * operands, real], dim=2).flatten(1)
        else:
            x = self._coded(x)
        if self.positions is not None:
            x = x + self.positions
        return x if self.embedding is None else torch.tanh(self.embedding(x[:, :, None])).flatten(1)

    def _coded(self, x: Tensor) -> Tensor:
        coded = x
        if self._tokens == "centred":
            is_operator = torch.arange(TOKENS, device=x.device) % 2 == 1
            coded = torch.where(is_operator, 0.25 + 0.5 * x, x)
        if self._padding == "zeros":
            real = terms(x)[2].expand(-1, -1, 2).flatten(1)[:, 1:]  # [N, 15]: an operator belongs to its operand
            coded = real * coded
        return coded


def _moved(x: Tensor) -> Tensor:
    """Return each expression a random number of terms further to the right, with padding before it."""
    count = terms(x)[2].sum(dim=1)  # [N, 1]
    offset = (torch.rand_like(count) * (MAX_TERMS - count + 1)).long()
    places = torch.arange(TOKENS, device=x.device) - 2 * offset
    return torch.where(places < 0, PADDING, x.gather(1, places.clamp(min=0)))
