"""What modules read and return in a forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn


class Passed(NamedTuple):
    """Input and output of a module."""

    read: Tensor
    returned: Tensor


@contextmanager
def recorded(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Passed]]:
    """Yield a dictionary that, after a forward pass in the block, has the input and output of each module."""
    found: dict[nn.Module, Passed] = {}

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found[module] = Passed(inputs[0], output)

    handles = [module.register_forward_hook(keep) for module in modules]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
