"""A model, reduced from end to end: losses of all options, a plan, and its layers one after the other.

Each layer is calibrated on the outputs of the reduced layers before it; its target is the original layer on these same
inputs. The state of an unfinished reduction is saved after every layer; the same call resumes from it and ends with the
same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from edge.errors import Literally
from edge.files import sha256
from export.errors import ReductionError
from export.reduction.calibration import check_calibration
from export.reduction.layer import LayerReport, reduced_layer
from export.reduction.plan import Plan, check_plan, plan_of
from export.reduction.search import Costs, Grid, LossMeter, choose_shapes
from export.reduction.states import after_attention, after_feed_forward, embedded, layers_of
from export.reduction.sublayers import Method
from export.tasks.objectives import Head
from export.tasks.state import fingerprint, load_state, save_state
from export.tasks.tokens import Batch, Rows, sorted_batches
from export.transformer import Layer

_BATCH = 32
_LOSSES = "losses.state"


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
        reports: one for each layer.
        expected_speedup: what the times of the layers add up to; to be confirmed by
            :func:`export.reduction.latency.measure_models`.
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
    method: Method = "calibrated",
    state: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> ReducedModel:
    """Return the model that is so much faster and answers most like the original.

    Args:
        model: the original, with the head of its task; it is left alone.
        calibration: real inputs of the task. Their targets are not read.
        target_speedup: of the whole model, above 1.
        times: of a layer, in units of the dense one, from :func:`export.reduction.latency.measure_times` or
            :func:`export.reduction.search.mac_times`.
        rest: the time of embeddings and task head, in the same unit.
        state: a directory for the state of an unfinished reduction. Losses serve every target, so keep it to ask for
            another one.

    Raises:
        ReductionError: weights are not finite, layers differ or are reduced already, or the calibration set is too
            small.
        PlanError: no plan is that fast.
        CheckpointError: the state is malformed, of another reduction, or cannot be written.
    """
    check_model(model)
    losses = measure_losses(model, calibration, grid, method=method, state=state, on_progress=on_progress)
    config = model.transformer.config
    shapes, speedup = choose_shapes(config.layers[0], grid, losses, times, rest, target_speedup)
    plan = plan_of(config, shapes)
    reduced, reports = apply_plan(model, calibration, plan, method=method, state=state, on_progress=on_progress)
    return ReducedModel(reduced, _chosen(plan, reports), reports, speedup)


def measure_losses(
    model: Head,
    calibration: Rows,
    grid: Grid,
    *,
    method: Method = "calibrated",
    state: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> list[Costs]:
    """Return what each option of each layer does to the answers; arguments and errors as :func:`reduce_model`."""
    batches = calibration_batches(model, calibration)
    saved = _Saved(state and state / _LOSSES, model, calibration, f"{grid} {method}")
    losses = [Costs(*pair) for pair in saved.value.get("losses", [])]
    layers = len(model.transformer.layers)
    if len(losses) == layers:
        return losses
    meter = LossMeter(model, batches, embedded(model.transformer, batches), grid, method)
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
    method: Method = "calibrated",
    state: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Head, tuple[LayerReport, ...]]:
    """Return a model with the layers of a plan, and what became of each; other arguments as :func:`reduce_model`.

    Heads and hidden units that the plan leaves open are chosen here.

    Raises:
        ReductionError: the calibration set is too small, or an activation is not finite.
        PlanError: the plan does not fit.
        CheckpointError: the state is malformed, of another reduction, or cannot be written.
    """
    check_plan(plan, model.transformer.config, "plan")
    batches = calibration_batches(model, calibration)
    saved = _Saved(state and layers_state(state, plan), model, calibration, f"{plan} {method}")
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
            new, halfway, report = reduced_layer(layer, plan.layers[number], states, batches, method)
            reports.append(report)
            weights.append(new.state_dict())
            saved.save({"weights": weights, "reports": msgspec.json.encode(reports).decode()})
            on_progress(Progress("layers", number + 1, len(plan.layers)))
        transformer.layers[number] = new
        states = after_feed_forward(new, halfway)
    transformer.config = config
    return reduced, tuple(reports)


def layers_state(state: Path, plan: Plan) -> Path:
    """Return where the layers of an unfinished plan are kept; each plan has a place of its own."""
    return state / f"layers-{sha256(msgspec.json.encode(plan))[:12]}.state"


def check_model(model: Head) -> None:
    """Check that a model can be reduced, before anything takes time.

    Raises:
        ReductionError: a weight is not finite, a head has a scorer, or the layers are not all alike and whole.
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
    """Saved state of a reduction, on disk if it has a path."""

    def __init__(self, path: Path | None, model: Head, calibration: Rows, settings: str) -> None:
        self._path = path
        self.value: dict[str, Any] = {}
        if path is not None:
            self._fingerprint = fingerprint([model], calibration, settings)
            self.value = load_state(path, self._fingerprint) or {}

    def save(self, value: dict[str, Any]) -> None:
        if self._path is not None:
            save_state(self._path, {"fingerprint": self._fingerprint, **value})
