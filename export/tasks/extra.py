"""Losses that a training minimises beside the task's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn


class Extra(Protocol):
    """A loss beside the task's own, and the parameters that only it needs.

    Attributes:
        name: all that it depends on, in words.
        rates: parameters that learn at so many times the recipe's rate.
    """

    name: str
    rates: Mapping[nn.Parameter, float]

    def prepare(self, progress: float) -> None:
        """Get ready for the next batch, after a share ``progress`` of all steps."""

    def loss(self, progress: float) -> Tensor:
        """Return what is added to the loss of the batch that the model has just seen, a scalar."""
