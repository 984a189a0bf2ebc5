"""Time of each file of a bundle on this machine, and of one loop of a looped model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from edge.bench.conditions import device_name, power_mode
from edge.bench.timing import seconds_in_turns
from edge.bundles.bundle import Bundle
from edge.bundles.golden import Golden
from edge.bundles.programs import LoopProgram
from edge.datatypes import Array
from edge.programs.program import LoopLimits
from edge.programs.tier_program import TierProgram, golden_loops, load_tier
from edge.runner import Runner
from edge.runtimes.build import build

#: Calls of a file that are timed together, and at least as many loops by which two timed requests differ.
_SERIES = 8


class FileTime(msgspec.Struct, frozen=True, kw_only=True):
    """Median time of a call of one file for golden rows, of several calls in a row."""

    tier: str
    role: str
    file: str
    precision: str
    runtime: str
    rows: int
    milliseconds: float


class LoopTime(msgspec.Struct, frozen=True):
    """One loop of a tier, as the server runs it.

    Attributes:
        milliseconds: of a loop without the embedding: the difference between requests of more and of fewer loops.
        beyond_step_microseconds: of these, what a call of the step's file alone does not take.
        golden_loops: mean of the golden rows, within the model's own limits.
        request_milliseconds: median of golden rows that end on their own.
    """

    tier: str
    rows: int
    milliseconds: float
    beyond_step_microseconds: float
    golden_loops: float
    request_milliseconds: float


class BundleTimes(msgspec.Struct, frozen=True):
    """Times of a bundle, in the conditions that they depend on; ``power_mode`` is empty except on a Jetson."""

    name: str
    version: int
    device: str
    power_mode: str
    calls: int
    files: tuple[FileTime, ...]
    loops: tuple[LoopTime, ...]


def time_parts(
    path: Path,
    *,
    target: str = "auto",
    calls: int = 60,
    cache: Path | None = None,
    on_progress: Callable[[int, int, str], None] = lambda done, parts, name: None,
) -> BundleTimes:
    """Build a bundle, and time its files and loops with one row and with the most rows, in turns.

    ``on_progress`` receives the number of finished and of all measurements, and the present tier.

    Raises:
        UsageError: a Jetson hides its power mode.
        FewheadsError: as :func:`edge.runtimes.build.build`.
    """
    bundle, mode, device = Bundle.open(path), power_mode(), ""
    manifest = bundle.manifest
    sizes = sorted({1, manifest.max_batch_size or 1})
    files: list[FileTime] = []
    loops: list[LoopTime] = []
    total = len(manifest.tiers) * len(sizes)
    for tier in manifest.tiers:
        on_progress(len(files) // len(manifest.roles), total, tier.name)
        for role in manifest.roles:
            build(bundle, target, cache, tier=tier.name, role=role)
        with closing(load_tier(bundle, target, cache, tier=tier.name)) as program:
            device = device_name(program.main.runner.device)
            for rows in sizes:
                seconds = seconds_in_turns(_functions(program, rows), calls)
                files += [
                    FileTime(
                        tier=tier.name,
                        role=role,
                        file=loaded.artifact.file,
                        precision=loaded.artifact.precision,
                        runtime=loaded.runtime.name,
                        rows=rows,
                        milliseconds=float(1e3 * np.median(seconds[role])) / _SERIES,
                    )
                    for role, loaded in program.files.items()
                ]
                if program.loop:
                    of_loop = (seconds["many"] - seconds["few"]) / _loops_apart(program.loop)
                    beyond = of_loop - seconds["step"] / _SERIES
                    ms, microseconds = float(1e3 * np.median(of_loop)), float(1e6 * np.median(beyond))
                    request_ms = float(1e3 * np.median(seconds["request"]))
                    loops.append(LoopTime(tier.name, rows, ms, microseconds, golden_loops(program), request_ms))
                on_progress(len(files) // len(manifest.roles), total, tier.name)
    return BundleTimes(manifest.name, manifest.version, device, mode, calls, tuple(files), tuple(loops))


def _functions(program: TierProgram, rows: int) -> dict[str, Callable[[], object]]:
    """Return what to time, by role; of a loop also requests of few and many loops, and one with its own limits."""
    bundle = program.bundle
    tier = bundle.tier(program.tier)
    functions: dict[str, Callable[[], object]] = {}
    for role, loaded in program.files.items():
        inputs = _rows_of(bundle, bundle.golden_of(tier, loaded.artifact), rows)
        functions[role] = partial(_series, loaded.runner, inputs)
    if program.loop:
        inputs = _rows_of(bundle, bundle.goldens[tier.name], rows)
        for name, loops in (("few", 1), ("many", 1 + _loops_apart(program.loop))):
            functions[name] = partial(program.compute, inputs, LoopLimits(loops, -1.0))  # no residual is below 0
        functions["request"] = partial(program.compute, inputs)
    return functions


def _loops_apart(loop: LoopProgram) -> int:
    """Return how many loops more the longer request computes: both compute whole groups of ``check_every``."""
    return -(-_SERIES // loop.check_every) * loop.check_every


def _series(runner: Runner, feeds: Mapping[str, Array]) -> None:
    for _ in range(_SERIES):
        runner.infer(feeds)


def _rows_of(bundle: Bundle, golden: Golden, rows: int) -> Mapping[str, Array]:
    if not bundle.manifest.max_batch_size:
        return golden.inputs
    return {name: array[np.arange(rows) % len(array)] for name, array in golden.inputs.items()}
