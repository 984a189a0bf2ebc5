"""The program of a bundle, made of its loaded runners, and how it repeats a golden set."""

from __future__ import annotations

from collections.abc import Mapping

from edge.bundles.bundle import Bundle
from edge.bundles.fields import Role, Struct
from edge.bundles.golden import Golden
from edge.bundles.programs import CascadeProgram, GenerateProgram, HeadProgram, LoopProgram
from edge.programs.generate import generator
from edge.programs.head import head_of
from edge.programs.loop import Loop, LoopRunners
from edge.programs.program import Cascade, LoopLimits, Options, Program, SingleRun
from edge.programs.sampling import Sampling
from edge.runner import Runner


def program_of(bundle: Bundle, runners: Mapping[tuple[str, Role], Runner]) -> Program:
    """Return the program that computes requests on some of a bundle's tiers, from the runners of all of their roles.

    Without both of its tiers, a cascade is single runs. Malformed tensors of a head, or tokenizers, raise a
    BundleError.
    """
    config, roles = bundle.manifest.program, bundle.manifest.roles
    tiers = {tier: runner for (tier, role), runner in runners.items() if role == roles[-1]}
    if isinstance(config, LoopProgram):
        return Loop(config, {tier: LoopRunners(runners[tier, "embed"], step) for tier, step in tiers.items()})
    if isinstance(config, GenerateProgram):
        return generator(bundle, config, tiers)
    if isinstance(config, HeadProgram):
        return head_of(bundle, config, tiers)
    if isinstance(config, CascadeProgram) and {config.lean, config.full} <= tiers.keys():
        return Cascade(config, tiers)
    return SingleRun(tiers)


def golden_options(program: Struct | None, tier: str, golden: Golden) -> Options:
    """Return options for as many loops or tokens as the golden set of a manifest's program is of."""
    if isinstance(program, LoopProgram):
        return Options(tier, LoopLimits(program.max_loops, -1.0))  # no residual is below 0
    if isinstance(program, GenerateProgram):
        return Options(tier, sampling=Sampling(int(golden.outputs[program.generated].max())))
    return Options(tier)
