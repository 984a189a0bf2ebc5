"""Further training of a model that has been trained: after a reduction, or to need fewer loops."""

from __future__ import annotations

import msgspec

from export.looped.model import PromptConfig
from export.looped.objective import Rising
from export.looped.recipes import STEPS_PER_EPOCH, Plan, Size, plan_of

#: Share of the steps with a rising learning rate, which then falls to 0.
_WARMUP_SHARE = 0.05


def tuning_plan(function: str, config: PromptConfig, steps: int, *, factor: int = 1) -> Plan:
    """Return one stage like the last one of the model's own plan, at the end of its curriculum.

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
        window=min(usual.window, loops),
        drawn_loops=drawn,
    )
    epochs = -(-steps // STEPS_PER_EPOCH)
    recipe = msgspec.structs.replace(
        stage.recipe, epochs=epochs, warmup_share=_WARMUP_SHARE, schedule="cosine", final_share=0.0
    )
    tune = msgspec.structs.replace(
        stage, name="tune", recipe=recipe, curriculum=curriculum, evaluated_loops=loops, steps_per_epoch=steps // epochs
    )
    return Plan(config, (tune,))
