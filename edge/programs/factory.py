"""The program of a bundle, made of its loaded runners."""

from __future__ import annotations

from collections.abc import Mapping

from edge.bundles.bundle import Bundle
from edge.bundles.fields import Role
from edge.bundles.programs import CascadeProgram, GenerateProgram, HeadProgram, LoopProgram
from edge.programs.generate import generator
from edge.programs.head import head_of
from edge.programs.loop import Loop, LoopRunners
from edge.programs.program import Cascade, Program, SingleRun
from edge.runner import Runner


def program_of(bundle: Bundle, runners: Mapping[tuple[str, Role], Runner]) -> Program:
    """Return the program that computes requests on some of a bundle's tiers.

    Args:
        runners: of every role of each of these tiers. Without both of its tiers, a cascade is single runs.

    Raises:
        BundleError: the tensors of a head, or a tokenizer, are malformed.
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
