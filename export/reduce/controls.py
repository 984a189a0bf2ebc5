"""Simple reductions at the same speed, against which the search for shapes and the calibration are measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn

from edge.errors import Raw
from export.data.tokens import Batch
from export.errors import PlanError
from export.models.heads import Head
from export.reduce.grid import Times
from export.reduce.plan import LayerPlan, ReductionPlan
from export.reduce.states import gradient_importance
from export.reduce.sublayers import Method
from export.reduce.target import Strategy


class Choice(NamedTuple):
    """A plan, and the statistics that its reduction uses."""

    plan: ReductionPlan
    method: Method


def first_layers(model: Head, times: Times, target_speedup: float) -> ReductionPlan:
    """Leave only the first layers of a model, in place: as many as come nearest to a speed-up.

    Raises:
        PlanError: the model has one layer only.
    """
    config = model.transformer.config
    if len(config.layers) == 1:
        fix = "Start from a model of several layers."
        raise PlanError("the first layers", given=Raw("a model of one layer"), expected="two at least", fix=fix)
    whole = times.of(config.layers)
    speedups = [whole / times.of(config.layers[:number]) for number in range(1, len(config.layers))]
    number = 1 + int(np.abs(np.log(np.array(speedups) / target_speedup)).argmin())
    model.transformer.layers = nn.ModuleList(list(model.transformer.layers)[:number])
    model.transformer.config = msgspec.structs.replace(config, layers=config.layers[:number])
    left_out = [None] * (len(config.layers) - number)
    return ReductionPlan(
        config.dim, config.layers, (*(LayerPlan(shape) for shape in config.layers[:number]), *left_out)
    )


def chosen(strategy: Strategy, plan: ReductionPlan, model: Head, batches: Sequence[Batch], seed: int) -> Choice:
    """Return a plan of the same shapes with the heads and units that a strategy keeps.

    Args:
        batches: with targets, for the gradients.
        seed: of a random choice.
    """
    if strategy == "weights":
        return Choice(plan, "weights")
    if strategy == "gradient":
        scores = [tuple(importance) for importance in gradient_importance(model, batches)]
    elif strategy == "random":
        generator = torch.Generator().manual_seed(seed)
        scores = [
            (torch.rand(dense.num_heads, generator=generator), torch.rand(dense.ffn_dim, generator=generator))
            for dense in plan.dense
        ]
    else:
        return Choice(plan, "calibrated")
    layers = tuple(
        layer and LayerPlan(layer.shape, _largest(heads, layer.shape.num_heads), _largest(units, layer.shape.ffn_dim))
        for layer, (heads, units) in zip(plan.layers, scores, strict=True)
    )
    return Choice(msgspec.structs.replace(plan, layers=layers), "slice" if strategy == "random" else "weights")


def _largest(scores: torch.Tensor, number: int) -> tuple[int, ...]:
    """Return the indices of the largest scores, ascending."""
    return tuple(sorted(scores.argsort(descending=True)[:number].tolist()))
