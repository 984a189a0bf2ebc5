"""Which heads and neurons of a language model go first, and how many each layer keeps.

Ranked is by the loss of optimal brain surgery (:mod:`export.reduce.algebra`), measured in what the error of a part's
output does to the model's logits. This unit is the same in all layers, so that they can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from edge.datatypes import Array
from edge.errors import UsageError
from export.generate.calibration import Calibration
from export.generate.parts import Part
from export.reduce.algebra import Removal, head_removal, neuron_removal, regularised

#: Is called with the work, and how many of how many parts of it are done.
OnPart = Callable[[str, int, int], None]

#: Neurons are removed in blocks, because products of such sizes are faster.
NEURON_BLOCK = 8


def by_magnitude(layers: Sequence[tuple[Part, Part]]) -> list[list[Removal]]:
    """Return the order of removal of heads and of neurons in each layer by the squares of their weights."""
    found = []
    for parts in layers:
        squares = [part.squares() for part in parts]
        found.append([Removal(tuple(one.argsort(stable=True).tolist()), _sums(one.sort().values)) for one in squares])
    return found


def by_calibration(calibration: Calibration, seed: int, on_part: OnPart) -> list[list[Removal]]:
    """Return the order of removal of heads and of neurons in each layer by the texts; the calibration is used up."""
    sensitivities = calibration.sensitivities(seed)
    found = []
    for number, (attention, feed_forward) in enumerate(calibration.layers):
        parts = (attention, feed_forward)
        (C, _), (A, _) = calibration.features(number, parts)
        # The removal measures errors by their squares; in these coordinates, a square is a change of the logits.
        W_O, W_2 = (
            part.weight @ torch.linalg.cholesky(regularised(F))
            for part, F in zip(parts, sensitivities[number], strict=True)
        )
        found.append([head_removal(C, W_O, attention.groups), neuron_removal(A, W_2)])
        calibration.advance(number)
        on_part("ranking", number + 1, len(calibration.layers))
    return found


def blocks_to_remove(option: str, groups: Sequence[int], share: float, block: int) -> int:
    """Return how many blocks of groups go so that a share of all layers' groups stays.

    Raises:
        UsageError: a layer would keep none; ``option`` names the share.
    """
    blocks = [number // block for number in groups]
    number = round((1 - share) * sum(blocks))
    if not 0 <= number <= sum(blocks) - len(blocks):
        expected = f"{len(blocks) / sum(blocks):.3g} to 1, because each layer keeps at least {block} of {groups[0]}"
        raise UsageError(option, given=share, expected=expected, fix="Give a larger share.")
    return number


def kept_counts(removals: Sequence[Removal], fewer: int, block: int = 1) -> list[int]:
    """Return how many groups each layer keeps when all together lose some blocks, at the least sum of losses.

    Args:
        fewer: how many blocks of ``block`` groups go; one block of each layer stays.
    """
    losses = [_block_losses(removal, block) for removal in removals]
    layer = np.repeat(np.arange(len(losses)), [len(one) - 1 for one in losses])
    first = np.concatenate([one[:-1] for one in losses]).argsort(kind="stable")[:fewer]
    gone = np.bincount(layer[first], minlength=len(losses)) * block
    return [len(removal.order) - int(count) for removal, count in zip(removals, gone, strict=True)]


def _block_losses(removal: Removal, block: int) -> Array:
    """Return the losses of removing one block after the other, made ascending, so that none comes before another."""
    whole = len(removal.order) // block * block
    return np.maximum.accumulate(removal.errors.diff()[:whole].double().numpy().reshape(-1, block).sum(axis=1))


def _sums(values: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=values.dtype), values.cumsum(0)])
