"""From the last hidden states of a language model to its logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class ReadOut(NamedTuple):
    """From hidden states to the logits of the frozen model.

    Attributes:
        weight: of the language model's last layer, [V, E].
        softcap: see :func:`softcapped`.
    """

    weight: Tensor
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return z [N, V] for states [N, E]."""
        return softcapped(functional.linear(hidden, self.weight), self.softcap)


def read_out_of(model: Any) -> ReadOut:
    """Return the read-out of a causal model of transformers."""
    return ReadOut(model.get_output_embeddings().weight, getattr(model.config, "final_logit_softcapping", None))


def softcapped(values: Tensor, cap: float | None) -> Tensor:
    """Return c tanh(x / c), as in Gemma 2; None caps nothing."""
    return values if cap is None else cap * torch.tanh(values / cap)
