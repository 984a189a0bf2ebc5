"""Further training of a model that has been trained: after a reduction, or to need fewer loops."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edge.errors import UsageError
from export.checkpoint import load
from export.looped import MODEL
from export.looped.model import PromptConfig
from export.looped.objective import Rising, Teacher
from export.looped.recipes import Plan, Size, plan_of, stage_of
from export.looped.train import Start, create, train_run
from export.runs import RunMetrics
from export.training.device import DeviceName
from export.training.observer import SILENT, Observer

#: Share of the steps with a rising learning rate, which then falls to 0.
_WARMUP_SHARE = 0.05


def tuning_plan(function: str, config: PromptConfig, steps: int, *, factor: int = 1) -> Plan:
    """Return one stage like the last one of the model's own plan, at the end of its curriculum and at half the rate.

    Args:
        config: of the model, whose layers may be smaller than the plan's.
        steps: 0 is a plan without training.
        factor: loops of the teacher for one of the learner's, which trains with as many fewer.
    """
    if not steps:
        return Plan(config, ())
    size: Size = "small" if config.dims == plan_of(function, "small").config.dims else "paper"
    stage = plan_of(function, size, injection=config.injection, steps=steps).stages[-1]
    usual = stage.curriculum
    loops, drawn = usual.loops.end, usual.drawn_loops
    if config.injection is not None:
        loops, drawn = max(1, loops // factor), drawn and max(1, drawn // factor)
    curriculum = msgspec.structs.replace(
        usual,
        dims=Rising(config.dims, config.dims),
        points=Rising(config.points, config.points),
        loops=Rising(loops, loops),
        window=min(usual.window, drawn or loops),
        drawn_loops=drawn,
    )
    # The weights are trained already.
    rate = stage.recipe.peak_learning_rate / 2
    recipe = msgspec.structs.replace(stage.recipe, peak_learning_rate=rate, schedule="cosine", final_share=0.0)
    warmup_steps = round(_WARMUP_SHARE * steps)
    return Plan(config, (stage_of("tune", steps, recipe, curriculum, loops, warmup_steps=warmup_steps),))


def halve(
    teacher: Path,
    function: str,
    directory: Path,
    *,
    steps: int,
    seed: int,
    device: DeviceName = "cpu",
    tensorboard: Path | None = None,
    observer: Observer = SILENT,
) -> RunMetrics:
    """Train a copy of a run to predict after n loops what the run predicts after 2n; other arguments as ``train_run``.

    Raises:
        UsageError: the run is of another function class.
    """
    model, config, _ = load(teacher, {MODEL: create})
    if config.arguments["function"] != function:
        given, fix = config.arguments["function"], "Give a run of the same function class."
        raise UsageError(f"--teacher {teacher}", given=given, expected=function, fix=fix)
    return train_run(
        function,
        tuning_plan(function, model.config, steps, factor=2),
        directory,
        seed=seed,
        device=device,
        tensorboard=tensorboard,
        start=Start(model, f"from {teacher.name}, in half of its loops", Teacher(model, factor=2), config.speedup),
        observer=observer,
    )
