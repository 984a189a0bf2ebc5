"""The further training of a model whose layers have been reduced."""

from __future__ import annotations

import msgspec

from export.looped.model import PromptConfig
from export.looped.objective import Rising
from export.looped.recipes import Plan, Size, plan_of, stage_of

#: Share of the steps with a rising learning rate, which then falls to 0.
_WARMUP_SHARE = 0.05


def tuning_plan(function: str, config: PromptConfig, steps: int) -> Plan:
    """Return one stage like the last one of the model's own plan, at the end of its curriculum and at half the rate.

    Args:
        config: of the model, whose layers may be smaller than the plan's.
        steps: 0 is a plan without training.
    """
    if not steps:
        return Plan(config, ())
    size: Size = "small" if config.dims == plan_of(function, "small").config.dims else "paper"
    stage = plan_of(function, size, injection=config.injection, steps=steps).stages[-1]
    loops = stage.curriculum.loops.end
    curriculum = msgspec.structs.replace(
        stage.curriculum,
        dims=Rising(config.dims, config.dims),
        points=Rising(config.points, config.points),
        loops=Rising(loops, loops),
    )
    # The weights are trained already.
    rate = stage.recipe.peak_learning_rate / 2
    recipe = msgspec.structs.replace(stage.recipe, peak_learning_rate=rate, schedule="cosine", final_share=0.0)
    warmup_steps = round(_WARMUP_SHARE * steps)
    return Plan(config, (stage_of("tune", steps, recipe, curriculum, loops, warmup_steps=warmup_steps),))
