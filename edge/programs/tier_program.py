"""One tier of a bundle as a program in this process, without a server around it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from edge.bundles.bundle import Bundle
from edge.bundles.fields import Role
from edge.bundles.programs import LoopProgram
from edge.datatypes import Array
from edge.errors import FewheadsError
from edge.programs.factory import program_of
from edge.programs.loop import limits_of
from edge.programs.program import Computed, LoopLimits, Options
from edge.protocol import LOOPS
from edge.runtimes.build import Loaded, load_with
from edge.runtimes.runtime import Runtime
from edge.runtimes.table import first_that_works


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
