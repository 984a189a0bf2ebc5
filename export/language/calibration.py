"""Calibration of language models: what the last projections of each layer read, and how much their outputs matter.

The layers run one after the other on texts, so that each can be changed before the next one reads its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from edge.errors import Raw
from export.data.tokens import sorted_batches
from export.errors import ReductionError
from export.generate.objective import Batch, learnt_logits, padded
from export.generate.parts import Part, layers_of, parts_of
from export.generate.tokenizer import Encoded
from export.reduce.calibration import Moments
from export.reduce.states import recorded, tokens_of
from export.training.device import model_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BATCH = 16


class Features(NamedTuple):
    """Statistics of the inputs z of a part's last projection, float64.

    Attributes:
        covariance: of z, [w, w]; about zero, E[z zᵀ], if the projection has no bias that could take up a mean.
        mean: of z, [w]; zeros if the projection has no bias.
    """

    covariance: Tensor
    mean: Tensor


class Calibration:
    """A model on texts, layer by layer from the first on.

    Attributes:
        layers: attention and feed-forward of each.

    Raises:
        ReductionError: there are not more tokens than features in the widest part.
    """

    def __init__(self, model: PreTrainedModel, rows: Sequence[Encoded]) -> None:
        self.model = model
        self.layers = parts_of(model)
        device = model_device(model)
        lengths = np.array([len(row.ids) for row in rows])
        widest, tokens = max(part.features.numel() for parts in self.layers for part in parts), int(lengths.sum())
        if tokens <= widest:
            given, fix = Raw(f"{tokens} tokens in {len(rows)} texts"), "Give more --data or a larger --texts."
            expected = f"more than {widest}, the features of the widest part"
            raise ReductionError("calibration set", given=given, expected=expected, fix=fix)
        places = sorted_batches(lengths, _BATCH)
        self._batches = [padded([rows[place] for place in some], device) for some in places]
        self._masks = [
            torch.arange(batch.ids.shape[1], device=device) < torch.from_numpy(lengths[some]).to(device)[:, None]
            for batch, some in zip(self._batches, places, strict=True)
        ]
        self._calls, self._states = [], []
        for batch in self._batches:
            state, calls = _calls_of(model, batch)
            self._states.append(state)
            self._calls.append(calls)

    def features(self, layer: int, parts: Sequence[Part]) -> list[Features]:
        """Return the statistics of some parts of a layer, after all layers before it were advanced over.

        Raises:
            ReductionError: an activation is not finite.
        """
        moments = [Moments(1, part.features.numel()) for part in parts]
        for state, calls, mask in zip(self._states, self._calls, self._masks, strict=True):
            with torch.no_grad(), recorded(part.output for part in parts) as found:
                calls[layer](state)
            for part, sums in zip(parts, moments, strict=True):
                sums.add(tokens_of(found[part.output].read, mask))
        return [_features(part, sums) for part, sums in zip(parts, moments, strict=True)]

    @torch.no_grad()
    def advance(self, layer: int) -> None:
        """Run a layer as it is now; the next one reads its output."""
        self._states = [calls[layer](state) for state, calls in zip(self._states, self._calls, strict=True)]

    def sensitivities(self, seed: int) -> list[list[Tensor]]:
        """Return F = E[g gᵀ] for the output of each part of each layer, [d, d].

        g is the gradient of random sums of the logits, with weights from N(0, 1) less their mean, so that δᵀ F δ is the
        square by which a small error δ of the output moves the logits of all tokens that are learnt, apart from a shift
        of all logits of a token. Unlike gradients of the loss, these do not vanish where a model is sure of its texts.
        """
        generator = torch.Generator().manual_seed(seed)
        outputs = [part.output for parts in self.layers for part in parts]
        moments: list[Moments] = []
        for batch, mask in zip(self._batches, self._masks, strict=True):
            with recorded(outputs) as found:
                logits, _ = learnt_logits(self.model, batch)
            weights = torch.randn(logits.shape, generator=generator)
            total = (logits * (weights - weights.mean(dim=1, keepdim=True)).to(logits.device)).sum()
            gradients = torch.autograd.grad(total, [found[output].returned for output in outputs])
            moments = moments or [Moments(1, gradient.shape[-1]) for gradient in gradients]
            for sums, gradient in zip(moments, gradients, strict=True):
                sums.add(tokens_of(gradient, mask))
        found_all = [sums.second_moment[0] for sums in moments]
        return [found_all[place : place + 2] for place in range(0, len(found_all), 2)]


@torch.no_grad()
def _calls_of(model: Any, batch: Batch) -> tuple[Tensor, list[Callable[[Tensor], Tensor]]]:
    """Return the input of the first layer, and each layer as a function of its input, with masks and positions."""
    states: list[Tensor] = []
    calls: list[Callable[[Tensor], Tensor]] = []

    def keep(layer: nn.Module, inputs: tuple[Any, ...], further: dict[str, Any]) -> None:
        states.append(inputs[0])
        calls.append(partial(_called, layer, inputs[1:], further))

    handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers_of(model)]
    try:
        model.base_model(batch.ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return states[0], calls


def _called(layer: nn.Module, others: tuple[Any, ...], further: dict[str, Any], state: Tensor) -> Tensor:
    output: Tensor = layer(state, *others, **further)
    return output


def _features(part: Part, moments: Moments) -> Features:
    covariance, mean = moments.second_moment[0], torch.zeros_like(moments.mean[0])
    if part.has_bias:
        covariance, mean = moments.covariance[0], moments.mean[0]
    if not torch.isfinite(covariance).all():
        fix = "Check the model on these texts with fewheads language evaluate."
        raise ReductionError("activations", given=Raw("NaN or Inf"), expected="finite numbers", fix=fix)
    return Features(covariance, mean)
