"""A running average of weights (EMA), which takes the place of choosing the best epoch by a small hold-out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class AveragedWeights:
    """The running average of some parameters, beside them.

    Step t, from 1, keeps min(``decay``, t / (t + 10)) of the average, so that the first weights fade soon even where
    the training is short. Unlike PyTorch's ``AveragedModel``, it copies only what is trained, and a model is measured
    with its averaged weights in place.

    Args:
        parameters: on one device; their present values are the first average.
        decay: in [0, 1), such as 0.999, for about the last 1,000 steps.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self._parameters, self._decay, self._step = list(parameters), decay, 0
        self._average = [parameter.detach().clone() for parameter in self._parameters]

    def update(self) -> None:
        """Add the present weights, after a step of the optimiser."""
        self._step += 1
        kept = min(self._decay, self._step / (self._step + 10))
        torch._foreach_lerp_(self._average, [parameter.detach() for parameter in self._parameters], 1 - kept)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model its averaged weights for the block, in which it may be read but not trained."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for parameter, average in zip(self._parameters, self._average, strict=True):
            parameter.data, average.data = average.data, parameter.data

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs to go on with the same bits."""
        return {"step": self._step, "average": self._average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of an average of the same parameters."""
        self._step = state["step"]
        for average, saved in zip(self._average, state["average"], strict=True):
            average.copy_(saved)
