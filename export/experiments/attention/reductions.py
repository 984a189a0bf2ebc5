"""Mechanisms with smaller matrices before the training: head pruning by gradients, and calibrated reduction."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import nn

from export.models.heads import SequenceClassifier
from export.models.transformer import TransformerConfig
from export.papers.adaptive.records import ChangedModel, Kept, SharedInputs
from export.papers.adaptive.use import rows_of
from export.reduce.calibration import attention_statistics
from export.reduce.grid import Grid, grid_of
from export.reduce.plan import plan_of
from export.reduce.reduce import LayerReport, apply_plan, measure_losses, reduce_model
from export.reduce.search import least_loss
from export.reduce.states import after_feed_forward, embedded, gradient_importance, layers_of
from export.reduce.sublayers import AttentionReducer


def pruned_by_gradient(shared: SharedInputs) -> ChangedModel:
    """Return the model without the heads of least importance, over all layers, as Michel et al. 2019 prune.

    Their importance is divided by its norm within the layer. No weights are refitted.
    """
    model, batches = copy.deepcopy(shared.dense), shared.batches()
    config = model.transformer.config
    importance = torch.stack(
        [layer.heads / layer.heads.norm() for layer in gradient_importance(shared.dense, batches)]
    )  # [layers, H]
    number = round(shared.share * importance.numel())
    chosen = torch.zeros_like(importance).flatten()
    chosen[importance.flatten().argsort(descending=True)[:number]] = 1
    kept = chosen.view_as(importance)
    states = embedded(shared.dense.transformer, batches)
    shapes = []
    originals = layers_of(shared.dense.transformer)
    for original, layer, mask, shape in zip(originals, layers_of(model.transformer), kept, config.layers, strict=True):
        statistics, after = attention_statistics(original, states, batches)
        assert original.attention is not None
        heads = tuple(torch.where(mask > 0)[0].tolist())
        scale = original.attention.scale
        reduced = AttentionReducer(original.attention, statistics, "slice").with_heads(heads, shape.head_dim, scale)
        layer.attention = reduced.module
        constant = reduced.constant
        layer.attention_constant = None if constant is None else nn.Parameter(constant)
        shapes.append(msgspec.structs.replace(shape, num_heads=len(heads), scale=scale))
        states = after_feed_forward(original, after)
    model.transformer.config = msgspec.structs.replace(config, layers=tuple(shapes))
    return ChangedModel(model, rows_of(kept))


def attention_plan(shared: SharedInputs) -> ChangedModel:
    """Return the calibrated reduction that keeps ``share`` of the attention and all hidden units."""
    config = shared.dense.transformer.config
    dense = config.layers[0]
    whole = grid_of(config)
    grid = Grid(whole.attention, (dense.ffn_dim,))
    losses = measure_losses(shared.dense, shared.calibration, grid, state=shared.state / "attention")
    shares = np.array([heads * rank / (dense.num_heads * dense.head_dim) for heads, rank in grid.attention])
    table = np.array([layer.attention for layer in losses])
    chosen = least_loss(table, shares, shared.share * len(config.layers))
    assert chosen is not None, "shares are whole numbers of bins"
    plan = plan_of(config, [grid.shape(option, 0, dense) for option in chosen])
    model, reports = apply_plan(shared.dense, shared.calibration, plan, state=shared.state / "attention")
    assert isinstance(model, SequenceClassifier)
    return ChangedModel(model, _kept(reports, config))


def whole_plan(shared: SharedInputs) -> ChangedModel:
    """Return the calibrated reduction of heads and hidden units at the target speed-up."""
    config = shared.dense.transformer.config
    assert shared.costs.times is not None
    reduced = reduce_model(
        shared.dense,
        shared.calibration,
        shared.target_speedup,
        times=shared.costs.times,
        state=shared.state / "whole",
    )
    assert isinstance(reduced.model, SequenceClassifier)
    return ChangedModel(reduced.model, _kept(reduced.reports, config))


def _kept(reports: Sequence[LayerReport], original: TransformerConfig) -> Kept:
    dense = original.layers[0]
    kept = torch.zeros(len(original.layers), dense.num_heads)
    for report in reports:
        kept[report.number, list(report.plan.heads or ())] = report.plan.shape.head_dim / dense.head_dim
    return rows_of(kept)
