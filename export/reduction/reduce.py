"""Reduction of a model: losses of all options, a plan, and its layers one after the other.

Each layer is calibrated on the outputs of the reduced layers before it. Its target is the output of the original layer
in the original model, so that it makes up for the layers before it. The state of an unfinished reduction is saved after
every layer; the same call resumes from it and ends with the same bits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from edge.errors import Raw
from export.data.tokens import Batch, Rows, sorted_batches
from export.errors import ReductionError
from export.finetune.objectives import outputs_of
from export.models.heads import Head
from export.models.transformer import Layer, LayerShape
from export.reduce.calibration import attention_statistics, check_calibration, feed_forward_statistics
from export.reduce.controls import chosen, first_layers, uniform_shapes
from export.reduce.grid import Grid, Times
from export.reduce.losses import Losses, LossMeter
from export.reduce.plan import LayerPlan, check_plan, plan_of
from export.reduce.plan import ReductionPlan as Plan
from export.reduce.refit import refitted, sums
from export.reduce.search import choose_shapes
from export.reduce.states import (
    Padded,
    after_attention,
    after_feed_forward,
    embedded,
    layers_of,
    relative_error,
)
from export.reduce.sublayers import (
    AttentionReducer,
    FeedForwardReducer,
    Method,
    ReducedAttention,
    ReducedFeedForward,
    with_attention,
    with_feed_forward,
)
from export.reduce.target import Strategy
from export.training.checkpoint import fingerprint, load_state, save_state

_BATCH = 32
#: About how many tokens the losses of the options are measured on, in units of the widest layer's features: losses take
#: the longest, and need fewer inputs than the weights.
_LOSS_TOKENS = 2.5
#: How the names of files with the layers of unfinished plans begin.
LAYERS = "layers"


class LayerReport(msgspec.Struct, frozen=True):
    """Result of reducing a layer. Errors are mean squares, relative to the variance of the original.

    Attributes:
        plan: its shape, and the heads and hidden units that stay.
        logits_error: of attention logits, from the new width of heads; predicted.
        attention_error: of the attention's output, from fewer heads and smaller values; predicted.
        measured_attention_error: of the attention's output, from all causes, on the calibration inputs.
        feed_forward_error: of the feed-forward's output; predicted.
        measured_feed_forward_error: of the feed-forward's output, on the calibration inputs.
        number: of the original layer, from 0.
    """

    plan: LayerPlan
    logits_error: float
    attention_error: float
    measured_attention_error: float
    feed_forward_error: float
    measured_feed_forward_error: float
    number: int = 0


class Wanted(NamedTuple):
    """Outputs of a layer in the original model, as :func:`export.reduce.refit.sums` has them, of each half."""

    attention: list[Tensor]
    feed_forward: list[Tensor]


def reduced_layer(
    layer: Layer,
    plan: LayerPlan,
    states: Sequence[Tensor],
    batches: Sequence[Padded],
    wanted: Wanted | None = None,
    method: Method = "calibrated",
) -> tuple[Layer, list[Tensor], LayerReport]:
    """Reduce a layer: first its attention, then its feed-forward for the output of the new attention.

    Args:
        layer: the original; it is not changed. A half that is a constant stays one.
        plan: its shape; heads and hidden units that it leaves open are chosen here.
        wanted: the target; None is the layer's own output for ``states``.

    Returns:
        The new layer, the output of its first half for the states, and the report.

    Raises:
        ReductionError: an activation is not finite.
    """
    shape = plan.shape
    before = layer if wanted is None else refitted(layer, "attention", states, wanted.attention, batches)
    if before.attention is None:
        attention = ReducedAttention(None, before.attention_constant, (), 0.0, 0.0)
    else:
        reducer = AttentionReducer(before.attention, attention_statistics(before, states, batches)[0], method)
        heads = plan.heads
        if heads is None:
            attention = reducer.reduced(shape.num_heads, shape.head_dim, shape.scale)
        else:
            attention = reducer.with_heads(heads, shape.head_dim, shape.scale)
    halved = with_attention(before, attention)
    attention_error = relative_error(before, halved, "attention", states, batches)
    halfway = after_attention(halved, states, batches)
    if wanted is not None:
        halved = refitted(halved, "feed_forward", halfway, wanted.feed_forward, batches)
    if halved.feed_forward is None:
        feed_forward = ReducedFeedForward(None, halved.feed_forward_constant, (), 0.0)
    else:
        statistics = feed_forward_statistics(halved, halfway, batches)
        units = FeedForwardReducer(halved.feed_forward, statistics, method)
        feed_forward = units.reduced(shape.ffn_dim) if plan.neurons is None else units.with_neurons(plan.neurons)
    new = with_feed_forward(halved, feed_forward)
    report = LayerReport(
        LayerPlan(shape, attention.heads, feed_forward.neurons),
        attention.logits_error,
        attention.output_error,
        attention_error,
        feed_forward.output_error,
        relative_error(halved, new, "feed_forward", halfway, batches),
    )
    return new, halfway, report


class Progress(msgspec.Struct, frozen=True):
    """Position of a reduction: ``done`` of ``layers`` layers have their losses measured, or are reduced."""

    stage: Literal["losses", "layers"]
    done: int
    layers: int


class ReducedModel(NamedTuple):
    """A smaller model.

    Attributes:
        model: in evaluation mode; its configuration has the new shapes.
        plan: with the layers, heads and hidden units that stay.
        reports: of the layers that stay.
        expected_speedup: by the sum of the layers' times, not measured on the whole model.
    """

    model: Head
    plan: Plan
    reports: tuple[LayerReport, ...]
    expected_speedup: float


def reduce_model(
    model: Head,
    calibration: Rows,
    target_speedup: float,
    *,
    times: Times,
    strategy: Strategy = "search",
    seed: int = 0,
    asymmetric: bool = False,
    state: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> ReducedModel:
    """Return the model whose outputs are closest to the original's at a target speed-up, or a control of that speed.

    Args:
        model: the original, with the head of its task; it is not changed.
        calibration: real inputs of the task. Only the strategy ``gradient`` reads their targets.
        times: of the options, such as :attr:`export.reduce.device.Device.mean`.
        strategy: see :data:`export.reduce.target.Strategy`.
        seed: of a random choice.
        asymmetric: whether a layer makes up for the reduced ones before it; only the search and ``uniform`` can.
        state: a directory for the state of an unfinished reduction. It also has the losses, which serve every target.

    Raises:
        ReductionError: weights are not finite, or the calibration set is too small.
        CheckpointError: the state is malformed, of another reduction, or cannot be written.
    """
    check_weights(model)
    config = model.transformer.config
    if strategy == "first-layers":
        shorter = copy.deepcopy(model).eval()
        plan = first_layers(shorter, times, target_speedup)
        kept = enumerate(plan.layers)
        reports = tuple(LayerReport(layer, 0.0, 0.0, 0.0, 0.0, 0.0, number) for number, layer in kept if layer)
        reduced = shorter
    else:
        losses = measure_losses(model, calibration, times.grid, state=state, on_progress=on_progress)
        if strategy == "uniform":
            shapes: list[LayerShape | None] = [*uniform_shapes(config, losses, times, target_speedup)]
        else:
            shapes = choose_shapes(config.layers, losses, times, target_speedup)
        batches = calibration_batches(model, calibration)
        plan, method = chosen(strategy, plan_of(config, shapes), model, batches, seed)
        reduced, reports = apply_plan(
            model, calibration, plan, state=state, on_progress=on_progress, method=method, asymmetric=asymmetric
        )
        carried_out = {report.number: report.plan for report in reports}
        plan = msgspec.structs.replace(plan, layers=tuple(map(carried_out.get, range(len(plan.layers)))))
    return ReducedModel(reduced, plan, reports, times.of(config.layers) / times.of(plan.shapes))


def measure_losses(
    model: Head,
    calibration: Rows,
    grid: Grid,
    *,
    state: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> list[Losses]:
    """Return the loss of each option for each layer; arguments and errors as :func:`reduce_model`."""
    batches = calibration_batches(model, calibration, share=_loss_share(model, calibration))
    saved = _Saved(state, "losses", model, calibration, f"{grid} and none {_LOSS_TOKENS}")
    losses = [Losses(*values) for values in saved.value.get("losses", [])]
    layers = len(model.transformer.layers)
    if len(losses) == layers:
        return losses
    meter = LossMeter(model, batches, embedded(model.transformer, batches), grid)
    for number in range(layers):
        if number < len(losses):
            meter.skip(number)
            continue
        losses.append(meter.measure(number))
        saved.save({"losses": [tuple(costs) for costs in losses]})
        on_progress(Progress("losses", number + 1, layers))
    return losses


def apply_plan(
    model: Head,
    calibration: Rows,
    plan: Plan,
    *,
    state: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    method: Method = "calibrated",
    asymmetric: bool = False,
) -> tuple[Head, tuple[LayerReport, ...]]:
    """Return a model with the layers of a plan, and a report for each; arguments as :func:`reduce_model`.

    Heads and hidden units that the plan leaves open are chosen here.

    Args:
        method: baselines do not use the activations.
        asymmetric: whether a layer makes up for the reduced ones before it; baselines never do.

    Raises:
        ReductionError: the calibration set is too small, or an activation is not finite.
        PlanError: the plan does not fit.
        CheckpointError: the state is malformed, of another reduction, or cannot be written.
    """
    check_plan(plan, model.transformer.config, "plan")
    batches = calibration_batches(model, calibration)
    asymmetric = asymmetric and method == "calibrated"
    saved = _Saved(state, LAYERS, model, calibration, f"{plan} {method} {asymmetric}")
    weights: list[dict[str, Tensor]] = saved.value.get("weights", [])
    reports = msgspec.json.decode(saved.value.get("reports", "[]"), type=list[LayerReport])
    reduced = copy.deepcopy(model).eval()
    transformer = reduced.transformer
    config = msgspec.structs.replace(transformer.config, layers=plan.shapes)
    states = embedded(transformer, batches)
    originals, kept = states, list[Layer]()
    for number, (layer, wish) in enumerate(zip(layers_of(transformer), plan.layers, strict=True)):
        wanted = None
        if asymmetric:
            wanted, originals = _wanted(layer, originals, batches)
        if wish is None:
            continue
        if len(kept) < len(weights):
            new = Layer(config, wish.shape)
            new.load_state_dict(weights[len(kept)])
            new.eval().to(layer.attention_norm.weight)
            halfway = after_attention(new, states, batches)
        else:
            new, halfway, report = reduced_layer(layer, wish, states, batches, wanted, method)
            reports.append(msgspec.structs.replace(report, number=number))
            weights.append(new.state_dict())
            saved.save({"weights": weights, "reports": msgspec.json.encode(reports).decode()})
            on_progress(Progress("layers", number + 1, len(plan.layers)))
        kept.append(new)
        states = after_feed_forward(new, halfway)
    transformer.layers, transformer.config = nn.ModuleList(kept), config
    return reduced, tuple(reports)


def _wanted(layer: Layer, states: Sequence[Tensor], batches: Sequence[Padded]) -> tuple[Wanted, list[Tensor]]:
    """Return the outputs of a layer of the original model, and the input of the next one."""
    halfway = after_attention(layer, states, batches)
    wanted = Wanted(sums(layer, "attention", states, batches), sums(layer, "feed_forward", halfway, batches))
    return wanted, after_feed_forward(layer, halfway)


def divergence(model: Head, reduced: Head, rows: Rows) -> float:
    """Return the mean divergence of a reduced model from the original; of a regression, the mean squared error."""
    total = 0.0
    with torch.no_grad():
        for indices in sorted_batches(rows.lengths, _BATCH):
            batch = rows.batch(indices)
            outputs, wanted = (outputs_of(one, batch) for one in (reduced, model))
            total += len(indices) * float(model.imitation(outputs, wanted, temperature=1.0))
    return total / len(rows.lengths)


def check_weights(model: Head) -> None:
    """Check that all weights are finite; raise a ReductionError that names the first that is not."""
    for name, tensor in model.state_dict().items():
        if not torch.isfinite(tensor).all():
            given, fix = Raw("NaN or Inf"), "Train the model again."
            raise ReductionError(f"weights {name}", given=given, expected="finite numbers", fix=fix)


def check_original(model: Head) -> None:
    """Check that the weights of a model are finite, and that it is not reduced.

    Raises:
        ReductionError: a weight is not finite, or the layers are not all of one shape, with heads and hidden units.
    """
    check_weights(model)
    shapes = model.transformer.config.layers
    if len(set(shapes)) != 1 or not shapes[0].num_heads or not shapes[0].ffn_dim:
        given = Raw(f"{len(shapes)} layers of {len(set(shapes))} shapes")
        fix = "Start from the original model, not from a reduced one."
        raise ReductionError("model", given=given, expected="layers of one shape, with heads and units", fix=fix)


def calibration_batches(model: Head, calibration: Rows, share: float = 1.0) -> list[Batch]:
    """Return calibration inputs in batches.

    Args:
        share: of the inputs; they have the same spread of lengths as all.

    Raises:
        ReductionError: there are too few tokens for this model.
    """
    rows = np.concatenate(sorted_batches(calibration.lengths, _BATCH))  # longest first
    rows = rows[np.linspace(0, len(rows) - 1, math.ceil(share * len(rows))).astype(int)]
    batches = [calibration.batch(rows[first : first + _BATCH]) for first in range(0, len(rows), _BATCH)]
    check_calibration(model.transformer, batches)
    return batches


def _loss_share(model: Head, calibration: Rows) -> float:
    config = model.transformer.config
    widest = max(max(shape.num_heads * shape.head_dim, shape.ffn_dim) for shape in config.layers)
    return min(1.0, _LOSS_TOKENS * widest / float(calibration.lengths.sum()))


class _Saved:
    """A file in the directory of the state, one for each model, calibration set and settings."""

    def __init__(self, state: Path | None, name: str, model: Head, calibration: Rows, settings: str) -> None:
        self._path: Path | None = None
        self.value: dict[str, Any] = {}
        if state is not None:
            self._fingerprint = fingerprint([model], calibration.contents, settings)
            self._path = state / f"{name}-{self._fingerprint[:12]}.state"
            self.value = load_state(self._path, self._fingerprint) or {}

    def save(self, value: dict[str, Any]) -> None:
        if self._path is not None:
            save_state(self._path, {"fingerprint": self._fingerprint, **value})
