"""The order in which heads and neurons of a language model are removed, and the number that each layer keeps.

The order is that of the losses of optimal brain surgery (:mod:`export.reduce.algebra`), in units of what the error of
a sublayer's output does to the model's logits. They are the same in all layers, so that layers can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from edge.datatypes import Array
from edge.errors import Raw, UsageError
from export.data.tokens import sorted_batches
from export.errors import ReductionError
from export.generate.evaluate import learnt_logits, padded
from export.generate.sublayers import Sublayer, layers_of, sublayers_of
from export.generate.tokenizer import EncodedExample
from export.models.recorded import recorded
from export.reduce.algebra import Removal, regularised, removal_of
from export.reduce.calibration import Features, Moments, check_finite
from export.reduce.states import tokens_of
from export.training.device import model_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Is called with the work, and how many of how many parts of it are done.
OnPart = Callable[[str, int, int], None]

#: Neurons are removed in blocks, because products of such sizes are faster.
NEURON_BLOCK = 8
_BATCH = 16


class Calibration:
    """A model on texts, layer by layer from the first on, so that each can be changed before the next reads its output.

    Attributes:
        layers: attention and feed-forward of each.

    Raises:
        ReductionError: there are not more tokens than features in the widest sublayer.
    """

    def __init__(self, model: PreTrainedModel, rows: Sequence[EncodedExample]) -> None:
        self.model = model
        self.layers = sublayers_of(model)
        device = model_device(model)
        lengths = np.array([len(row.ids) for row in rows])
        widest, tokens = max(of.features.numel() for layer in self.layers for of in layer), int(lengths.sum())
        if tokens <= widest:
            given, fix = Raw(f"{tokens} tokens in {len(rows)} texts"), "Give more --data or a larger --texts."
            expected = f"more than {widest}, the features of the widest part"
            raise ReductionError("calibration set", given=given, expected=expected, fix=fix)
        numbers = sorted_batches(lengths, _BATCH)
        self._batches = [padded([rows[number] for number in batch], device) for batch in numbers]
        self._masks = [
            torch.arange(batch.ids.shape[1], device=device) < torch.from_numpy(lengths[of]).to(device)[:, None]
            for batch, of in zip(self._batches, numbers, strict=True)
        ]
        runs = [_layer_calls(model, batch.ids) for batch in self._batches]
        self._states, self._calls = [state for state, _ in runs], [calls for _, calls in runs]

    def features(self, layer: int, sublayers: Sequence[Sublayer]) -> list[Features]:
        """Return the statistics of some sublayers of a layer, after all layers before it were advanced over.

        Raises:
            ReductionError: an activation is not finite.
        """
        moments = [Moments(1, of.features.numel()) for of in sublayers]
        for state, calls, mask in zip(self._states, self._calls, self._masks, strict=True):
            with torch.no_grad(), recorded(of.output for of in sublayers) as passed:
                calls[layer](state)
            for of, sums in zip(sublayers, moments, strict=True):
                sums.add(tokens_of(passed[of.output].read, mask))
        return [_features(of, sums) for of, sums in zip(sublayers, moments, strict=True)]

    @torch.no_grad()
    def advance(self, layer: int) -> None:
        """Run a layer as it is now; the next one reads its output."""
        self._states = [calls[layer](state) for state, calls in zip(self._states, self._calls, strict=True)]

    def sensitivities(self, seed: int) -> list[list[Tensor]]:
        """Return F = E[g gᵀ] for the output of each sublayer of each layer, [d, d].

        g is the gradient of random sums of the logits, with weights from N(0, 1) less their mean, so that δᵀ F δ is the
        square by which a small error δ of the output moves the logits of all tokens that are learnt, apart from a shift
        of all logits of a token. Unlike gradients of the loss, these do not vanish where a model is sure of its texts.
        """
        generator = torch.Generator().manual_seed(seed)
        outputs = [of.output for layer in self.layers for of in layer]
        moments: list[Moments] = []
        for batch, mask in zip(self._batches, self._masks, strict=True):
            with recorded(outputs) as passed:
                logits, _ = learnt_logits(self.model, batch)
            weights = torch.randn(logits.shape, generator=generator)
            total = (logits * (weights - weights.mean(dim=1, keepdim=True)).to(logits.device)).sum()
            gradients = torch.autograd.grad(total, [passed[output].returned for output in outputs])
            moments = moments or [Moments(1, gradient.shape[-1]) for gradient in gradients]
            for sums, gradient in zip(moments, gradients, strict=True):
                sums.add(tokens_of(gradient, mask))
        return [[sums.second_moment[0] for sums in moments[first : first + 2]] for first in range(0, len(moments), 2)]


def by_calibration(calibration: Calibration, seed: int, on_part: OnPart) -> list[list[Removal]]:
    """Return the order of removal of heads and of neurons in each layer by the texts; the calibration is used up."""
    removals = []
    for number, (layer, sensitivities) in enumerate(
        zip(calibration.layers, calibration.sensitivities(seed), strict=True)
    ):
        # The removal measures errors by their squares; in these coordinates, a square is a change of the logits.
        removals.append(
            [
                removal_of(known.covariance, of.weight @ torch.linalg.cholesky(regularised(F)), of.groups)
                for of, known, F in zip(layer, calibration.features(number, layer), sensitivities, strict=True)
            ]
        )
        calibration.advance(number)
        on_part("ranking", number + 1, len(calibration.layers))
    return removals


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
    layer = np.repeat(np.arange(len(losses)), [len(of) - 1 for of in losses])
    first = np.concatenate([of[:-1] for of in losses]).argsort(kind="stable")[:fewer]
    gone = np.bincount(layer[first], minlength=len(losses)) * block
    return [len(removal.order) - int(count) for removal, count in zip(removals, gone, strict=True)]


def _block_losses(removal: Removal, block: int) -> Array:
    """Return the losses of removing one block after the other, made ascending, so that none comes before another."""
    whole = len(removal.order) // block * block
    return np.maximum.accumulate(removal.errors.diff()[:whole].double().numpy().reshape(-1, block).sum(axis=1))


@torch.no_grad()
def _layer_calls(model: Any, ids: Tensor) -> tuple[Tensor, list[Callable[[Tensor], Tensor]]]:
    """Return the input of the first layer, and each layer as a function of its input, with masks and positions."""
    states: list[Tensor] = []
    calls: list[Callable[[Tensor], Tensor]] = []

    def keep(layer: nn.Module, inputs: tuple[Any, ...], further: dict[str, Any]) -> None:
        states.append(inputs[0])
        calls.append(partial(_called, layer, inputs[1:], further))

    handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers_of(model)]
    try:
        model.base_model(ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return states[0], calls


def _called(layer: nn.Module, others: tuple[Any, ...], further: dict[str, Any], state: Tensor) -> Tensor:
    output: Tensor = layer(state, *others, **further)
    return output


def _features(sublayer: Sublayer, moments: Moments) -> Features:
    """Return the statistics; about zero, E[z zᵀ], if the projection has no bias that could take up a mean."""
    found = Features(moments.covariance[0], moments.mean[0])
    if not sublayer.has_bias:
        found = Features(moments.second_moment[0], torch.zeros_like(found.mean))
    check_finite(found, "Check the model on these texts with fewheads language evaluate.")
    return found
