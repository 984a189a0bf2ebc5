"""Networks without a stack that read the same tokens: an LSTM and a transformer encoder."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from edge.bundles.arithmetic import KINDS, PADDING
from export.papers.calculator.networks import Recurrent, sinusoids
from export.papers.calculator.stack import LSTM, TRANSFORMER


class TokenEmbedding(nn.Module):
    """A vector for each kind of token, plus a direction times the token's value: [N, length, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kinds = nn.Embedding(KINDS, width)
        self.value = nn.Parameter(0.1 * torch.randn(width))

    def forward(self, kinds: Tensor, values: Tensor) -> Tensor:
        """Return the vectors of tokens, from kinds and values [N, length]."""
        embedded: Tensor = self.kinds(kinds.clamp(0, KINDS - 1)) + values.float()[:, :, None] * self.value
        return embedded


class TokenLstm(nn.Module):
    """One LSTM layer; the answer is linear in its output after the last token. 43,617 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(16)
        self.lstm = Recurrent("LSTM", 16, 96)
        self.output = nn.Linear(96, 1)

    def forward(self, kinds: Tensor, values: Tensor) -> Tensor:
        """Return the answers, [N, 1]; kinds of int64 and values of float, both [N, length]."""
        states = self.lstm(self.embedding(kinds, values))
        following = torch.cat([kinds[:, 1:], torch.zeros_like(kinds[:, :1])], dim=1)
        is_last = (kinds != PADDING) & (following == PADDING)
        answers: Tensor = self.output((states * is_last[:, :, None]).sum(1))
        return answers


class TokenTransformer(nn.Module):
    """Two encoder layers; the answer is linear in the mean of their outputs over the tokens. 56,977 parameters."""

    def __init__(self) -> None:
        super().__init__()
        width = 48
        self.embedding = TokenEmbedding(width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(width, 1)

    def forward(self, kinds: Tensor, values: Tensor) -> Tensor:
        """Return the answers, [N, 1]; kinds of int64 and values of float, both [N, length]."""
        is_padding = kinds == PADDING
        vectors = self.embedding(kinds, values)
        vectors = vectors + sinusoids(*vectors.shape[1:])
        encoded = self.layers(vectors, src_key_padding_mask=is_padding)
        tokens = (~is_padding)[:, :, None]
        answers: Tensor = self.output((encoded * tokens).sum(1) / tokens.sum(1))
        return answers


#: By the names of their models.
BASELINES: dict[str, Callable[[], nn.Module]] = {LSTM: TokenLstm, TRANSFORMER: TokenTransformer}
