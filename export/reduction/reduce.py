"""Reduction of a model: losses of all options, a plan, and its layers one after the other.

Each layer is calibrated on the outputs of the reduced layers before it; its target is the original layer on these
inputs. The state of an unfinished reduction is saved after every layer; the same call resumes from it and ends with the
same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from edge.errors import Literally
from edge.files import sha256
from export.errors import ReductionError
from export.reduction.calibration import attention_statistics, check_calibration, feed_forward_statistics
from export.reduction.plan import LayerPlan, Plan, check_plan, plan_of
from export.reduction.search import Costs, Grid, LossMeter, choose_shapes
from export.reduction.states import (
    Padded,
    after_attention,
    after_feed_forward,
    embedded,
    layers_of,
    relative_error,
)
from export.reduction.sublayers import AttentionReducer, FeedForwardReducer, with_attention, with_feed_forward
from export.tasks.objectives import Head
from export.tasks.tokens import Batch, Rows, sorted_batches
from export.training.state import fingerprint, load_state, save_state
from export.transformer import Layer

_BATCH = 32
_LOSSES = "losses.state"


class LayerReport(msgspec.Struct, frozen=True):
    """Result of reducing a layer. Errors are mean squares, relative to the variance of the original.

    Attributes:
        plan: its shape, and the heads and hidden units that stay.
        logits_error: of attention logits, from the new width of heads; predicted.
        attention_error: of the attention's output, from fewer heads and smaller values; predicted.
        measured_attention_error: of the attention's output, from all causes, on the calibration inputs.
        feed_forward_error: of the feed-forward's output; predicted.
        measured_feed_forward_error: of the feed-forward's output, on the calibration inputs.
    """

    plan: LayerPlan
    logits_error: float
    attention_error: float
    measured_attention_error: float
    feed_forward_error: float
    measured_feed_forward_error: float


def reduced_layer(
    layer: Layer, plan: LayerPlan, states: Sequence[Tensor], batches: Sequence[Padded]
) -> tuple[Layer, list[Tensor], LayerReport]:
    """Reduce a layer: first its attention, then its feed-forward for the output of the new attention.

    Args:
        layer: the original, with heads and hidden units; it is not changed.
        plan: its shape; heads and hidden units that it leaves open are chosen here.

    Returns:
        The new layer, the output of its first half for the states, and the report.

    Raises:
        ReductionError: an activation is not finite.
    """
    shape = plan.shape
    assert layer.attention is not None
    assert layer.feed_forward is not None
    statistics, _ = attention_statistics(layer, states, batches)
    attention_reducer = AttentionReducer(layer.attention, statistics)
    if plan.heads is None:
        attention = attention_reducer.reduced(shape.num_heads, shape.head_dim, shape.scale)
    else:
        attention = attention_reducer.with_heads(plan.heads, shape.head_dim, shape.scale)
    halved = with_attention(layer, attention)
    halfway = after_attention(halved, states, batches)
    reducer = FeedForwardReducer(layer.feed_forward, feed_forward_statistics(halved, halfway, batches))
    feed_forward = reducer.reduced(shape.ffn_dim) if plan.neurons is None else reducer.with_neurons(plan.neurons)
    new = with_feed_forward(halved, feed_forward)
    report = LayerReport(
        LayerPlan(shape, attention.heads, feed_forward.neurons),
        attention.logits_error,
        attention.output_error,
        relative_error(layer, new, "attention", states, batches),
        feed_forward.output_error,
        relative_error(layer, new, "feed_forward", halfway, batches),
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
        plan: with the heads and hidden units that stay.
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
    grid: Grid,
    times: Costs,
    rest: float = 0.0,
    state: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> ReducedModel:
    """Return the model whose outputs are closest to the original's at a target speed-up.

    Args:
        model: the original, with the head of its task; it is not changed.
        calibration: real inputs of the task. Their targets are not read.
        times: of the options, in units of a dense layer, from :func:`export.reduction.latency.measure_times`.
        rest: the time of embeddings and task head, in the same unit.
        state: a directory for the state of an unfinished reduction. It also has the losses, which serve every target.

    Raises:
        ReductionError: weights are not finite, layers differ or are reduced already, or the calibration set is too
            small.
        CheckpointError: the state is malformed, of another reduction, or cannot be written.
    """
    check_model(model)
    losses = measure_losses(model, calibration, grid, state=state, on_progress=on_progress)
    config = model.transformer.config
    shapes, speedup = choose_shapes(config.layers[0], grid, losses, times, rest, target_speedup)
    plan = plan_of(config, shapes)
    reduced, reports = apply_plan(model, calibration, plan, state=state, on_progress=on_progress)
    return ReducedModel(reduced, _chosen(plan, reports), reports, speedup)


def measure_losses(
    model: Head,
    calibration: Rows,
    grid: Grid,
    *,
    state: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> list[Costs]:
    """Return the loss of each option for each layer; arguments and errors as :func:`reduce_model`."""
    batches = calibration_batches(model, calibration)
    saved = _Saved(state and state / _LOSSES, model, calibration, f"{grid} calibrated")
    losses = [Costs(*pair) for pair in saved.value.get("losses", [])]
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
) -> tuple[Head, tuple[LayerReport, ...]]:
    """Return a model with the layers of a plan, and a report for each; arguments as :func:`reduce_model`.

    Heads and hidden units that the plan leaves open are chosen here.

    Raises:
        ReductionError: the calibration set is too small, or an activation is not finite.
        PlanError: the plan does not fit.
        CheckpointError: the state is malformed, of another reduction, or cannot be written.
    """
    check_plan(plan, model.transformer.config, "plan")
    batches = calibration_batches(model, calibration)
    saved = _Saved(state and layers_state(state, plan), model, calibration, f"{plan} calibrated")
    weights: list[dict[str, Tensor]] = saved.value.get("weights", [])
    reports = msgspec.json.decode(saved.value.get("reports", "[]"), type=list[LayerReport])
    reduced = copy.deepcopy(model).eval()
    transformer = reduced.transformer
    config = msgspec.structs.replace(transformer.config, layers=tuple(layer.shape for layer in plan.layers))
    states = embedded(transformer, batches)
    for number, layer in enumerate(layers_of(transformer)):
        if number < len(weights):
            new = Layer(config, config.layers[number])
            new.load_state_dict(weights[number])
            new.eval().to(layer.attention_norm.weight)
            halfway = after_attention(new, states, batches)
        else:
            new, halfway, report = reduced_layer(layer, plan.layers[number], states, batches)
            reports.append(report)
            weights.append(new.state_dict())
            saved.save({"weights": weights, "reports": msgspec.json.encode(reports).decode()})
            on_progress(Progress("layers", number + 1, len(plan.layers)))
        transformer.layers[number] = new
        states = after_feed_forward(new, halfway)
    transformer.config = config
    return reduced, tuple(reports)


def layers_state(state: Path, plan: Plan) -> Path:
    """Return the file for the layers of an unfinished plan; each plan has its own."""
    return state / f"layers-{sha256(msgspec.json.encode(plan))[:12]}.state"


def check_model(model: Head) -> None:
    """Check that a model can be reduced.

    Raises:
        ReductionError: a weight is not finite, or the layers are not all of one shape, with heads and hidden units.
    """
    for name, tensor in model.state_dict().items():
        if not torch.isfinite(tensor).all():
            given, fix = Literally("NaN or Inf"), "Train the model again."
            raise ReductionError(f"weights {name}", given=given, expected="finite numbers", fix=fix)
    shapes = model.transformer.config.layers
    if len(set(shapes)) != 1 or not shapes[0].num_heads or not shapes[0].ffn_dim:
        given = Literally(f"{len(shapes)} layers of {len(set(shapes))} shapes")
        fix = "Start from the original model, not from a reduced one."
        raise ReductionError("model", given=given, expected="layers of one shape, with heads and units", fix=fix)


def calibration_batches(model: Head, calibration: Rows) -> list[Batch]:
    """Return calibration inputs in batches.

    Raises:
        ReductionError: there are too few tokens for this model.
    """
    batches = [calibration.batch(rows) for rows in sorted_batches(calibration.lengths, _BATCH)]
    check_calibration(model.transformer, batches)
    return batches


def _chosen(plan: Plan, reports: tuple[LayerReport, ...]) -> Plan:
    return msgspec.structs.replace(plan, layers=tuple(report.plan for report in reports))


class _Saved:
    def __init__(self, path: Path | None, model: Head, calibration: Rows, settings: str) -> None:
        self._path = path
        self.value: dict[str, Any] = {}
        if path is not None:
            self._fingerprint = fingerprint([model], [calibration.lengths, calibration.targets], settings)
            self.value = load_state(path, self._fingerprint) or {}

    def save(self, value: dict[str, Any]) -> None:
        if self._path is not None:
            save_state(self._path, {"fingerprint": self._fingerprint, **value})
