"""How a program repeats a golden set."""

from __future__ import annotations

from edge.bundles.fields import Struct
from edge.bundles.golden import Golden
from edge.bundles.programs import GenerateProgram, LoopProgram
from edge.programs.program import LoopLimits, Options
from edge.programs.sampling import Sampling


def golden_options(program: Struct | None, tier: str, golden: Golden) -> Options:
    """Return options for as many loops or tokens as the golden set of a manifest's program is of."""
    if isinstance(program, LoopProgram):
        return Options(tier, LoopLimits(program.max_loops, -1.0))  # no residual is below 0
    if isinstance(program, GenerateProgram):
        return Options(tier, sampling=Sampling(int(golden.outputs[program.generated].max())))
    return Options(tier)
