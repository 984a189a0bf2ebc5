"""Reduction of a looped run: fewer and smaller heads and fewer hidden units in the layers that run many times.

A layer computes different states in each loop, and one smaller layer has to serve them all. Its calibration therefore
reads the states of all loops of some prompts. A short training with the original as teacher follows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
import torch
from torch import Tensor

from edge.bench.layer_latencies import Comparison
from edge.bundles.manifest import Measure
from export.models.transformer import Layer, LayerShape
from export.papers.looped.model import PromptTransformer, step_feeds, step_onnx
from export.papers.looped.prompts import REDUCTION, draw_prompts, generator_of
from export.papers.looped.recipes import tuning_plan
from export.papers.looped.train import Start, evaluate, load_run, train_run
from export.reduce.latency import compare
from export.reduce.plan import LayerPlan, LayerReport
from export.reduce.reduce import reduced_layer
from export.reduce.states import after_feed_forward
from export.training.device import DeviceName
from export.training.objective import SILENT, Observer
from export.training.runs import RunMetrics, Speedup

#: Prompts whose states are measured, loops after which most have settled, and timed calls of each step graph.
_PROMPTS, _LOOPS, _CALLS = 128, 30, 300


class Reduced(msgspec.Struct, frozen=True):
    """Result of a reduction.

    Attributes:
        untrained: errors of the smaller model before its training.
        step: times of one loop of a prompt of the longest length on ONNX Runtime, one thread, the original's beside it.
    """

    directory: str
    layers: tuple[LayerReport, ...]
    untrained: tuple[Measure, ...]
    step: Comparison
    metrics: RunMetrics


class _Unpadded(NamedTuple):
    mask: None = None


def reduce_looped(
    source: str | Path,
    directory: str | Path,
    shape_of: Callable[[LayerShape], LayerShape],
    *,
    steps: int,
    seed: int = 0,
    device: DeviceName = "cpu",
    observer: Observer = SILENT,
) -> Reduced:
    """Reduce the layers of a run, train the result, and write it as a run directory; the same call resumes that.

    Args:
        directory: path of the new run; an earlier run there is replaced when this one is done.
        shape_of: returns the new shape of a layer, see :meth:`export.papers.looped.options.SizeOptions.shape`.
        steps: of the training; 0 leaves it out.
        seed: of the prompts of the training.

    Raises:
        UsageError: a size is larger than the original's, or none is smaller.
        ReductionError: an activation is not finite.
        TrainingError: the loss is no longer a finite number.
    """
    source = Path(source)
    model, config, _ = load_run(source)
    function = config.arguments["function"]
    small, reports = reduce_model(model, function, shape_of)
    step = compare(step_onnx(model), step_onnx(small), step_feeds(model.config, 1), _CALLS)
    untrained = evaluate(small, function)
    shape = small.config.shapes[0]
    sizes = f"{shape.num_heads} heads of {shape.head_dim} and {shape.ffn_dim} units"
    faster = step.ratio * (config.speedup.ratio if config.speedup else 1.0)
    origin, speedup = f"reduced from {source.name} to {sizes}", Speedup(faster, 2 * small.config.points - 1)
    plan, start = tuning_plan(function, small.config, steps), Start(small, origin, model, speedup)
    metrics = train_run(function, plan, directory, seed=seed, device=device, start=start, observer=observer)
    return Reduced(str(directory), reports, untrained, step, metrics)


def reduce_model(
    model: PromptTransformer, function: str, shape_of: Callable[[LayerShape], LayerShape]
) -> tuple[PromptTransformer, tuple[LayerReport, ...]]:
    """Return a model with smaller layers, which is not trained yet, and a report for each layer.

    Raises:
        ReductionError: an activation is not finite.
    """
    shapes = tuple(map(shape_of, model.config.shapes))
    states = layer_inputs(model, function)
    unpadded = [_Unpadded()] * len(states)
    small = PromptTransformer(msgspec.structs.replace(model.config, shapes=shapes))
    weights = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("layers.")}
    reports = []
    for number, (layer, shape) in enumerate(zip(model.layers, shapes, strict=True)):
        new, halfway, report = reduced_layer(cast(Layer, layer), LayerPlan(shape), states, unpadded)
        states = after_feed_forward(new, halfway)
        weights |= {f"layers.{number}.{name}": tensor for name, tensor in new.state_dict().items()}
        reports.append(report)
    small.load_state_dict(weights)
    return small.eval(), tuple(reports)


@torch.no_grad()
def layer_inputs(model: PromptTransformer, function: str) -> list[Tensor]:
    """Return what the first layer reads in each loop, [N, T, D] for each, of prompts for calibration."""
    config = model.config
    xs, ys = draw_prompts(function, _PROMPTS, config.points, config.dims, generator_of(REDUCTION))
    prompt = model.embed(xs, ys[:, :-1])
    state = model.first_state(prompt)
    states = []
    for _ in range(_LOOPS if config.injection else 1):
        states.append(model.layers_input(state, prompt))
        state = model.step(state, prompt)
    return states
