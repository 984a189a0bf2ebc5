"""Layers that run only for inputs whose score is above a threshold, as a branch of the exported graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from export.models.heads import Head
from export.models.transformer import Layer, LayerShape, TransformerConfig
from export.papers.adaptive.attention import THRESHOLD, soft_gate, straight_through

HeadT = TypeVar("HeadT", bound=Head)


class GatedLayer(Layer):
    """A layer that returns its input for inputs with a score of :data:`THRESHOLD` or less.

    In a batch, it runs for all rows as soon as one needs it. So a skipped layer costs nothing for one row, and the
    outputs of a row do not depend on the others.

    Args:
        layer: the weights, of a layer with this configuration and shape.
        scorer: returns scores [N, 1] for tokens [N, T, d] and their mask.
    """

    def __init__(self, layer: Layer, config: TransformerConfig, shape: LayerShape, scorer: nn.Module) -> None:
        super().__init__(config, shape)
        self.load_state_dict(layer.state_dict())
        self.scorer = scorer
        self.train(layer.training)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return [N, T, d]; arguments as for :class:`export.models.transformer.Layer`."""
        keep = self.keep(self.scorer(x, mask))
        if self.training:
            return x + keep * (super().forward(x, mask) - x)
        if torch.compiler.is_exporting():
            taken: Tensor = torch.cond(keep.any(), self._run, _skip, (x, mask, keep))
            return taken
        return self._run(x, mask, keep) if keep.any() else x

    def keep(self, scores: Tensor) -> Tensor:
        """Return whether each input runs, [N, 1, 1] of 0 and 1, for scores [N, 1]; with a gradient in training."""
        scores = scores[:, :, None]
        hard = (scores.detach() > THRESHOLD).to(scores.dtype)
        return straight_through(hard, soft_gate(scores)) if self.training else hard

    def _run(self, x: Tensor, mask: Tensor | None, keep: Tensor) -> Tensor:
        return torch.where(keep > 0, super().forward(x, mask), x)


def _skip(x: Tensor, mask: Tensor | None, keep: Tensor) -> Tensor:
    return x.clone()  # a branch may not return its input


def gated_model(model: HeadT, scorer_of: Callable[[int, int], nn.Module]) -> HeadT:
    """Return a copy of a model with a gate on every layer.

    Args:
        model: it is not changed.
        scorer_of: returns the scorer for the model's width and the number of a layer.
    """
    new = copy.deepcopy(model)
    config, layers = new.transformer.config, new.transformer.layers
    for number, shape in enumerate(config.layers):
        layer = layers[number]
        assert isinstance(layer, Layer)
        layers[number] = GatedLayer(layer, config, shape, scorer_of(config.dim, number))
    return new
