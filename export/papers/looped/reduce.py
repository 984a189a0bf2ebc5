"""Reduction of a looped run: fewer and smaller heads and fewer hidden units in the layers that run many times.

A layer computes different states in each loop, and one smaller layer has to serve them all. Its calibration therefore
reads the states of all loops of some prompts. A short training with the original as teacher follows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from edge.bench.layer_latencies import Comparison
from edge.bundles.manifest import Measure
from export.models.transformer import LayerShape
from export.papers.looped.model import PromptTransformer, step_feeds, step_onnx
from export.papers.looped.prompts import REDUCTION, draw_prompts, generator_of
from export.papers.looped.recipes import tuning_plan
from export.papers.looped.train import Start, evaluate, load_run, train_run
from export.reduce.latency import compare
from export.reduce.plan import LayerPlan, ReducedModel, ReducedRun, ReductionPlan
from export.reduce.reduce import reduced_layers
from export.training.device import DeviceName
from export.training.objective import SILENT, Observer
from export.training.runs import Speedup

#: Prompts whose states are measured, loops after which most have settled, and timed calls of each step graph.
_PROMPTS, _LOOPS, _CALLS = 128, 30, 300


class ReducedLoop(ReducedRun, frozen=True, kw_only=True):
    """A looped run that was reduced.

    Attributes:
        untrained: errors of the smaller model before its training.
        step: times of one loop of a prompt of the longest length on ONNX Runtime, one thread, the original's beside it.
    """

    untrained: tuple[Measure, ...]
    step: Comparison


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
) -> ReducedLoop:
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
    reduced = reduced_loop(model, function, shape_of)
    small = reduced.model
    step = compare(step_onnx(model), step_onnx(small), step_feeds(model.config, 1), _CALLS)
    untrained = evaluate(small, function)
    shape = small.config.shapes[0]
    sizes = f"{shape.num_heads} heads of {shape.head_dim} and {shape.ffn_dim} units"
    faster = step.ratio * (config.speedup.ratio if config.speedup else 1.0)
    origin, speedup = f"reduced from {source.name} to {sizes}", Speedup(faster, 2 * small.config.points - 1)
    plan, start = tuning_plan(function, small.config, steps), Start(small, origin, model, speedup)
    metrics = train_run(function, plan, directory, seed=seed, device=device, start=start, observer=observer)
    return ReducedLoop(str(directory), reduced.reports, metrics, untrained=untrained, step=step)


def reduced_loop(
    model: PromptTransformer, function: str, shape_of: Callable[[LayerShape], LayerShape]
) -> ReducedModel[PromptTransformer]:
    """Return a model with smaller layers, which is not trained yet.

    Raises:
        ReductionError: an activation is not finite.
    """
    config, states = model.config, layer_inputs(model, function)
    plan = ReductionPlan(config.dim, config.shapes, tuple(LayerPlan(shape_of(shape)) for shape in config.shapes))
    results = reduced_layers([*model.layers], plan, states, [_Unpadded()] * len(states))
    layers, reports = zip(*results, strict=True)
    small = copy.deepcopy(model).eval()
    small.layers, small.config = nn.ModuleList(layers), msgspec.structs.replace(config, shapes=plan.shapes)
    plan = msgspec.structs.replace(plan, layers=tuple(report.plan for report in reports))
    return ReducedModel(small, plan, reports)


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
