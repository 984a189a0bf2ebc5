"""Reduction of a model: losses of all options, a plan, and its layers one after the other.

Each layer is calibrated on the outputs of the reduced layers before it. The state of an unfinished reduction is saved
after every layer; the same call resumes from it and ends with the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import msgspec
from torch import Tensor, nn

from export.data.tokens import Batch, Rows
from export.models.heads import Head
from export.models.transformer import Layer, LayerShape
from export.reduce.calibration import attention_statistics, calibration_batches, check_weights, feed_forward_statistics
from export.reduce.grid import Times
from export.reduce.losses import OnProgress, SavedState, measure_losses, silent
from export.reduce.plan import LayerPlan, LayerReport, ReducedModel, ReductionPlan, plan_of
from export.reduce.search import choose_shapes
from export.reduce.spread import spread_shapes
from export.reduce.states import after_attention, after_feed_forward, embedded, layers_of, relative_error
from export.reduce.sublayers import AttentionReducer, FeedForwardReducer, ReducedHalf, with_half
from export.reduce.target import Strategy

#: How the names of files with the layers of unfinished plans begin.
LAYERS = "layers"


def reduced_layer(
    layer: Layer, shape: LayerShape, states: Sequence[Tensor], batches: Sequence[Batch]
) -> tuple[Layer, list[Tensor], LayerReport]:
    """Reduce a layer: first its attention, then its feed-forward for the output of the new attention.

    Args:
        layer: the original; it is not changed. A half that is a constant stays one.
        shape: of the new one; the heads and hidden units that stay are chosen here.

    Returns:
        The new layer, the output of its first half for the states, and the report.

    Raises:
        ReductionError: an activation is not finite.
    """
    if layer.attention is None:
        attention = ReducedHalf(None, layer.attention_constant, (), 0.0)
    else:
        heads = AttentionReducer(layer.attention, attention_statistics(layer, states, batches)[0])
        attention = heads.reduced(shape.num_heads, shape.head_dim, shape.scale)
    halved = with_half(layer, "attention", attention)
    halfway = after_attention(halved, states, batches)
    if layer.feed_forward is None:
        feed_forward = ReducedHalf(None, layer.feed_forward_constant, (), 0.0)
    else:
        statistics = feed_forward_statistics(halved, halfway, batches)
        feed_forward = FeedForwardReducer(layer.feed_forward, statistics).reduced(shape.ffn_dim)
    new = with_half(halved, "feed_forward", feed_forward)
    report = LayerReport(
        LayerPlan(shape, attention.kept, feed_forward.kept),
        attention.logits_error,
        attention.output_error,
        relative_error(layer, halved, "attention", states, batches),
        feed_forward.output_error,
        relative_error(halved, new, "feed_forward", halfway, batches),
    )
    return new, halfway, report


def reduce_model(
    model: Head,
    calibration: Rows,
    target_speedup: float,
    *,
    times: Times,
    strategy: Strategy = "search",
    loss_rows: Rows | None = None,
    state: Path | None = None,
    on_progress: OnProgress = silent,
) -> ReducedModel[Head]:
    """Return a model that reaches a target speed-up.

    Args:
        model: the original, with the head of its task; it is not changed.
        calibration: real inputs of the task.
        times: of the options, such as :attr:`export.reduce.device.Device.mean`.
        strategy: see :data:`export.reduce.target.Strategy`.
        loss_rows: inputs for the losses of the search, which the model has not learnt; None takes ``calibration``.
        state: a directory for the state of an unfinished reduction. It also has the losses, which serve every target.

    Raises:
        ReductionError: weights are not finite, or the calibration set is too small.
        CheckpointError: the state is malformed, of another reduction, or cannot be written.
    """
    check_weights(model)
    config = model.transformer.config
    if strategy == "spread":
        shapes = spread_shapes(config, times, target_speedup)
    else:
        losses = measure_losses(model, loss_rows or calibration, times.grid, state=state, on_progress=on_progress)
        shapes = choose_shapes(config.layers, losses, times, target_speedup)
    return apply_plan(model, calibration, plan_of(config, shapes), state=state, on_progress=on_progress)


def apply_plan(
    model: Head,
    calibration: Rows,
    plan: ReductionPlan,
    *,
    state: Path | None = None,
    on_progress: OnProgress = silent,
) -> ReducedModel[Head]:
    """Return a model with the layers of a plan, whose heads and hidden units are chosen here.

    Arguments are those of :func:`reduce_model`.

    Raises:
        ReductionError: the calibration set is too small, or an activation is not finite.
        CheckpointError: the state is malformed, of another reduction, or cannot be written.
    """
    batches = calibration_batches(model, calibration)
    saved = SavedState(state, LAYERS, model, calibration, f"{plan} calibrated")
    weights: list[dict[str, Tensor]] = saved.value.get("weights", [])
    reports = msgspec.json.decode(saved.value.get("reports", "[]"), type=list[LayerReport])
    reduced = copy.deepcopy(model).eval()
    transformer = reduced.transformer
    config = msgspec.structs.replace(transformer.config, layers=plan.shapes)
    like, kept = next(transformer.layers.parameters()), list[Layer]()
    states = embedded(transformer, batches)
    for number, (layer, planned) in enumerate(zip(layers_of(transformer), plan.layers, strict=True)):
        if planned is None:
            continue
        if len(kept) < len(weights):  # of an interrupted call
            new = Layer(config, planned.shape)
            new.load_state_dict(weights[len(kept)])
            new.eval().to(like)
            halfway = after_attention(new, states, batches)
        else:
            new, halfway, report = reduced_layer(layer, planned.shape, states, batches)
            reports.append(msgspec.structs.replace(report, number=number))
            weights.append(new.state_dict())
            saved.save({"weights": weights, "reports": msgspec.json.encode(reports).decode()})
            on_progress("layers", number + 1, len(plan.layers))
        kept.append(new)
        states = after_feed_forward(new, halfway)
    transformer.layers, transformer.config = nn.ModuleList(kept), config
    carried_out = {report.number: report.plan for report in reports}
    plan = msgspec.structs.replace(plan, layers=tuple(map(carried_out.get, range(len(plan.layers)))))
    return ReducedModel(reduced, plan, tuple(reports))
