"""Reduction of a looped run: fewer and smaller heads and fewer hidden units in the layers that run many times.

A layer computes different states in each loop, and one smaller layer has to serve them all. Its calibration therefore
reads the states of all loops of some prompts. These are drawn like those of training, from a seed of their own, and are
never those of an evaluation. A short training with the original as teacher follows.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, cast

import msgspec
import torch
from torch import Tensor

from edge.bench.layer_latencies import Comparison
from edge.bundles.manifest import Measure
from edge.errors import Raw, UsageError
from export.models.transformer import Layer, LayerShape
from export.papers.looped import MODEL
from export.papers.looped.functions import draw_prompts
from export.papers.looped.graphs import step_feeds, step_onnx
from export.papers.looped.model import PromptTransformer
from export.papers.looped.objective import Teacher
from export.papers.looped.recipes import tuning_plan
from export.papers.looped.seeds import REDUCTION, generator_of
from export.papers.looped.train import Start, create, evaluate, train_run
from export.reduce.latency import compare
from export.reduce.plan import LayerPlan
from export.reduce.reduce import LayerReport, reduced_layer
from export.reduce.states import after_feed_forward
from export.training.checkpoint import load
from export.training.device import DeviceName
from export.training.objective import SILENT, Observer
from export.training.runs import RunMetrics, Speedup

#: Prompts whose states are measured.
_PROMPTS = 128
#: After which most states have settled.
_LOOPS = 30
#: Calls of each step graph that is timed.
_CALLS = 300


class Smaller(msgspec.Struct, frozen=True):
    """What the layers of a looped model shrink to; None stays as it is."""

    heads: int | None = None
    head_dim: int | None = None
    units: int | None = None

    def shape(self, original: LayerShape) -> LayerShape:
        """Return the new shape of a layer.

        Raises:
            UsageError: it is larger than the original, or equal.
        """
        sizes = {}
        for option, given, most in (
            ("--heads", self.heads, original.num_heads),
            ("--head-dim", self.head_dim, original.head_dim),
            ("--units", self.units, original.ffn_dim),
        ):
            if given is not None and given > most:
                raise UsageError(option, given=given, expected=f"{most} at most", fix="Give a smaller number.")
            sizes[option] = most if given is None else given
        shape = LayerShape(*sizes.values())
        if shape == msgspec.structs.replace(original, scale=None):
            expected = f"fewer than {original.num_heads} heads of {original.head_dim} and {original.ffn_dim} units"
            subject, own = "--heads, --head-dim and --units", Raw("the run's own sizes")
            raise UsageError(subject, given=own, expected=expected, fix="Give a smaller number for one of them.")
        return shape


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
    smaller: Smaller,
    *,
    steps: int,
    seed: int = 0,
    device: DeviceName = "cpu",
    observer: Observer = SILENT,
) -> Reduced:
    """Reduce the layers of a run, train the result for some steps, and write it as a run directory.

    The state of an unfinished training is kept beside it; the same call resumes from it.

    Args:
        directory: path of the new run; an earlier run there is replaced when this one is done.
        steps: of the training; 0 leaves it out.
        seed: of the prompts of the training.

    Raises:
        UsageError: a size is larger than the original's, or none is smaller.
        ReductionError: an activation is not finite.
        TrainingError: the loss is no longer a finite number.
    """
    source = Path(source)
    model, config, _ = load(source, {MODEL: create})
    function = config.arguments["function"]
    small, reports = reduce_model(model, function, smaller)
    step = compare(step_onnx(model), step_onnx(small), step_feeds(model.config, 1), _CALLS)
    untrained = evaluate(small, function)
    shape = small.config.shapes[0]
    sizes = f"{shape.num_heads} heads of {shape.head_dim} and {shape.ffn_dim} units"
    faster = step.ratio * (config.speedup.ratio if config.speedup else 1.0)
    metrics = train_run(
        function,
        tuning_plan(function, small.config, steps),
        directory,
        seed=seed,
        device=device,
        start=Start(
            small,
            f"reduced from {source.name} to {sizes}",
            Teacher(model),
            Speedup(faster, 2 * small.config.points - 1),
        ),
        observer=observer,
    )
    return Reduced(str(directory), reports, untrained, step, metrics)


def reduce_model(
    model: PromptTransformer, function: str, smaller: Smaller
) -> tuple[PromptTransformer, tuple[LayerReport, ...]]:
    """Return a model with smaller layers, which is not trained yet, and a report for each layer.

    Raises:
        UsageError: a size is larger than the original's, or none is smaller.
        ReductionError: an activation is not finite.
    """
    shapes = tuple(smaller.shape(shape) for shape in model.config.shapes)
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
