"""Recipes of the models: the paper's size for a GPU, and one that two cores train in minutes."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from edge.errors import UsageError
from export.papers.looped.model import Injection, PromptConfig, gpt2_shapes
from export.papers.looped.options import LoopedOptions
from export.training.recipe import Recipe

#: The most steps between two scores.
_STEPS_PER_EPOCH = 500
#: With Muon, a quarter of AdamW's steps lead to the same error.
_SMALL = Recipe(epochs=1, optimizer="muon", peak_learning_rate=2e-3, batch_size=64, schedule="cosine", clip_norm=1.0)
_PAPER = Recipe(epochs=1, peak_learning_rate=1e-4, batch_size=64)
#: T and the last number of loops, by function class, of the paper's public code.
_LOOPS = {"linear": (15, 30), "sparse": (10, 20), "tree": (15, 70), "relu": (5, 12)}


class Rising(msgspec.Struct, frozen=True):
    """A number that grows during training: by ``increment`` every ``interval`` steps, from ``start`` to ``end``."""

    start: int
    end: int
    increment: int = 1
    interval: int = 1

    def at(self, step: int) -> int:
        """Return the number in a step, counted from 0."""
        return min(self.end, self.start + step // self.interval * self.increment)


class Curriculum(msgspec.Struct, frozen=True):
    """How prompts and loops grow.

    Attributes:
        dims: coordinates of the points that are not zero.
        points: of a prompt.
        loops: of the model; 1 for an unlooped one.
        window: T, the last loops whose predictions are in the loss.
        drawn_loops: the number of loops of each step is drawn evenly from here to ``loops``; None is ``loops`` itself.
            Training on drawn numbers makes a solver that holds its fixed point.
    """

    dims: Rising
    points: Rising
    loops: Rising = Rising(1, 1)
    window: int = 1
    drawn_loops: int | None = None


class Stage(msgspec.Struct, frozen=True):
    """One of the trainings of a model, whose score is measured after ``evaluated_loops``."""

    name: str
    recipe: Recipe
    curriculum: Curriculum
    evaluated_loops: int
    steps_per_epoch: int

    @property
    def steps(self) -> int:
        """The number of steps."""
        return self.recipe.epochs * self.steps_per_epoch


class TrainingPlan(msgspec.Struct, frozen=True):
    """The shape of a model, and the stages of its training."""

    config: PromptConfig
    stages: tuple[Stage, ...]


def training_plan(function: str, options: LoopedOptions) -> TrainingPlan:
    """Return how to train a model on a function class; prompts of the small size have pairs in proportion to ``dims``.

    Raises:
        UsageError: the width cannot be shared by the heads, or there are fewer stages.
    """
    injection = None if options.unlooped else options.injection or "add"
    make, usual_dim, heads = (_small, 64, 4) if options.size == "small" else (_paper, 256, 8)
    dim, layers = options.dim or usual_dim, options.layers or (12 if options.unlooped else 1)
    if dim % heads:
        fix = f"Give --dim {max(1, dim // heads) * heads}."
        raise UsageError("--dim", given=dim, expected=f"a multiple of the {heads} heads", fix=fix)
    plan = make(function, injection, layers, dim, options)
    if options.stages and options.stages > len(plan.stages):
        expected = f"at most {len(plan.stages)}, the stages of this plan"
        raise UsageError("--stages", given=options.stages, expected=expected, fix="Leave --stages out for all of them.")
    stages = []
    for stage in plan.stages[: options.stages]:
        rate = options.rate * stage.recipe.peak_learning_rate
        recipe = replace(stage.recipe, peak_learning_rate=rate, precision=options.precision)
        stages.append(replace(stage, recipe=recipe))
    return replace(plan, stages=tuple(stages))


def _small(function: str, injection: Injection | None, layers: int, dim: int, options: LoopedOptions) -> TrainingPlan:
    """Five dimensions and ten pairs; 20 pairs for trees and networks, which need more.

    The first stage finds a solution within few loops; the second, with drawn numbers of loops, makes it a fixed point.
    """
    dims = options.dims or 5
    short = function in ("linear", "sparse")
    pairs = (2 if short else 4) * dims
    config = PromptConfig(dims=dims, points=pairs + 1, dim=dim, shapes=gpt2_shapes(dim, 4, layers), injection=injection)
    steps = options.steps or 1500
    interval = max(1, steps // 5)
    # Of d dimensions, 2 are the first; both grow in three or four steps.
    curriculum = Curriculum(
        Rising(2, dims, -(-(dims - 2) // 3), interval),
        Rising(5, pairs + 1, -(-(pairs - 4) // (3 if short else 4)), interval),
    )
    if injection is None:
        # 5,000 steps of 12 layers, with gradients in all, cost what both stages of a looped model do; those of fewer
        # layers cost less.
        recipe = replace(_SMALL, peak_learning_rate=3e-3) if layers < 4 else _SMALL
        return TrainingPlan(config, (_stage("unlooped", steps * 10 // 3, recipe, curriculum, 1),))
    solve = replace(curriculum, loops=Rising(6, 12, 2, interval), window=6)
    settle = Curriculum(Rising(dims, dims), Rising(pairs + 1, pairs + 1), Rising(30, 30), window=8, drawn_loops=8)
    stages = (
        _stage("solve", steps, replace(_SMALL, peak_learning_rate=5e-3, schedule="constant"), solve, 12),
        # RESULTS.md has the errors of other rates.
        _stage("settle", max(1, steps * 8 // 3), replace(_SMALL, peak_learning_rate=6e-3), settle, 30),
    )
    return TrainingPlan(config, stages)


def _paper(function: str, injection: Injection | None, layers: int, dim: int, options: LoopedOptions) -> TrainingPlan:
    """Twenty dimensions, the curricula of Garg et al. 2022 and of the paper's public code, 500,000 steps."""
    long = function in ("tree", "relu")
    config = PromptConfig(
        dims=options.dims or 20,
        points=101 if long else 41,
        dim=dim,
        shapes=gpt2_shapes(dim, 8, layers),
        injection=injection,
    )
    steps = options.steps or 500_000
    interval, of_loops = (max(1, of * steps // 500_000) for of in (2000 if injection is None else 5000, 500))
    active = Rising(5, config.dims, 1, interval)
    points = Rising(26, 101, 5, interval) if long else Rising(11, 41, 2, interval)
    window, loops = _LOOPS[function]
    curriculum = Curriculum(active, points)
    if injection:
        curriculum = Curriculum(active, points, Rising(window, loops, 2, of_loops), window=window)
    return TrainingPlan(config, (_stage("paper", steps, _PAPER, curriculum, curriculum.loops.end, 0),))


def _stage(
    name: str, steps: int, recipe: Recipe, curriculum: Curriculum, evaluated_loops: int, warmup_steps: int = 200
) -> Stage:
    """Return a stage of so many steps, or up to a hundredth fewer, in epochs of equal length."""
    epochs = -(-steps // _STEPS_PER_EPOCH)
    per_epoch = steps // epochs
    recipe = replace(recipe, epochs=epochs, warmup_share=min(0.5, warmup_steps / (epochs * per_epoch)))
    return Stage(name, recipe, curriculum, evaluated_loops, per_epoch)
