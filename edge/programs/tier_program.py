"""One tier of a bundle as a program in this process, without a server around it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from edge.bundles.bundle import Bundle
from edge.bundles.fields import Role, Struct
from edge.bundles.golden import Golden
from edge.bundles.programs import CascadeProgram, GenerateProgram, HeadProgram, LoopProgram
from edge.datatypes import Array
from edge.errors import FewheadsError
from edge.programs.backward_head import head_of
from edge.programs.generate import generator
from edge.programs.loop import Loop, LoopRunners, limits_of
from edge.programs.program import Cascade, Computed, LoopLimits, Options, Program, SingleRun
from edge.programs.sampling import Sampling
from edge.protocol import LOOPS
from edge.runner import Runner
from edge.runtimes.build import Loaded, load_with
from edge.runtimes.runtime import Runtime
from edge.runtimes.table import first_that_works


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
        return generator(bundle, config, {tier: [runners[tier, role] for role in roles] for tier in tiers})
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


class TierProgram:
    """The program of one tier: it computes requests one at a time, and chooses among no tiers.

    ``files`` are those of each role; ``loop`` has the loop's limits and names, None if the model is not looped.
    """

    def __init__(self, bundle: Bundle, tier: str, files: Mapping[Role, Loaded]) -> None:
        self.bundle, self.tier, self.files = bundle, tier, files
        program = bundle.manifest.program
        self.loop = program if isinstance(program, LoopProgram) else None
        self._program = program_of(bundle, {(tier, role): loaded.runner for role, loaded in files.items()})

    @property
    def main(self) -> Loaded:
        """The file that computes the outputs: of a loop, its step."""
        return self.files[self.bundle.manifest.roles[-1]]

    def compute(self, inputs: Mapping[str, Array], limits: LoopLimits | None = None) -> Computed:
        """Compute one request; ``limits`` are those of a loop, None for the manifest's."""
        return self._program.compute(inputs, Options(self.tier, limits))

    def limits(self, max_loops: int | None = None, tolerance: float | None = None) -> LoopLimits | None:
        """Return the limits of a loop, see :func:`edge.programs.loop.limits_of`; None if the model is not looped."""
        if not self.loop:
            return None
        return limits_of(self.loop, self.bundle.manifest.name, max_loops=max_loops, tolerance=tolerance)

    def close(self) -> None:
        self._program.close()
        _close(self.files)


def load_tier(
    bundle: Bundle, target: str = "auto", cache: Path | None = None, *, tier: str | None = None
) -> TierProgram:
    """Load the files of a tier, the full one if None, all with the same runtime.

    Raise a FewheadsError as :func:`edge.runtimes.build.load_runner` and :func:`program_of`; nothing stays loaded then.
    """
    name = bundle.tier(tier).name
    load = partial(_load_files, bundle=bundle, tier=name, cache=cache)
    files = first_that_works(target, str(bundle.path), load)
    try:
        return TierProgram(bundle, name, files)
    except FewheadsError:
        _close(files)
        raise


def _load_files(runtime: Runtime, bundle: Bundle, tier: str, cache: Path | None) -> dict[Role, Loaded]:
    files: dict[Role, Loaded] = {}
    try:
        for role in bundle.manifest.roles:
            files[role] = load_with(runtime, bundle, cache, tier, role)
    except FewheadsError:
        _close(files)
        raise
    return files


def _close(files: Mapping[Role, Loaded]) -> None:
    for loaded in files.values():
        loaded.runner.close()


def golden_loops(program: TierProgram) -> float:
    """Return the mean loops of a looped model's golden rows, within its own limits."""
    golden = program.bundle.goldens[program.tier]
    most = program.bundle.manifest.max_batch_size
    loops = [
        program.compute({name: array[start : start + most] for name, array in golden.inputs.items()}).facts[LOOPS]
        for start in range(0, golden.rows, most)
    ]
    return float(np.concatenate(loops).mean())
