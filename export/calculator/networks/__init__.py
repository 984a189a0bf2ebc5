"""The calculator's networks, by the names of their bundles. Their shapes are in :mod:`export.papers.calculator.specs`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from export.papers.calculator.networks import (
    AttentiveRecurrent,
    FeedForward,
    Gate,
    Oracle,
    Regressor,
    Rnn,
    TermNetwork,
    Transformer,
)
from export.papers.calculator.specs import SPECS

_CLASSES = {
    network.__name__: network
    for network in (Oracle, Gate, TermNetwork, FeedForward, Rnn, AttentiveRecurrent, Transformer)
}
#: Functions that return an untrained network; they accept other arguments than those of the spec.
NETWORKS: dict[str, Callable[..., Regressor]] = {
    name: partial(_CLASSES[spec.network], **spec.arguments) for name, spec in SPECS.items()
}


def create(name: str, seed: int, **arguments: Any) -> Regressor:
    """Return an untrained network whose initial weights depend on ``seed`` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NETWORKS[name](**arguments)
