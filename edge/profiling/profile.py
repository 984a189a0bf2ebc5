"""Times every shape of a directory on this machine, and writes the table after each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from edge.bundles.bundle import Bundle
from edge.datatypes import NUMPY_TYPES, Array
from edge.errors import Literally, UsageError
from edge.profiling.conditions import Conditions
from edge.profiling.shapes import FLOOR, REST, ShapeSet, open_bundle, tier_of
from edge.profiling.table import LatencyTable, Rest, Timing, check_key
from edge.profiling.timing import compared_above, times_in_turns
from edge.runner import Runner
from edge.runtimes.build import build, load_runner
from edge.runtimes.runtime import Runtime
from edge.runtimes.table import choose

#: How often a shape is timed where the device throttles, before the timing is kept and marked.
_ATTEMPTS = 3
_COOL_DOWN_SECONDS = 5.0


class Progress(NamedTuple):
    """Position of a run: shapes done, all shapes, the one in work, and its step."""

    done: int
    shapes: int
    name: str
    step: str


class _Machine(NamedTuple):
    """How the bundles of a directory are built and loaded."""

    directory: Path
    runtime: Runtime
    target: str
    cache: Path | None

    def runner(self, name: str, precision: str | None, step: Callable[[str], None]) -> Runner:
        """Build a bundle, unless the cache has it, and load it."""
        bundle = open_bundle(self.directory, name)
        # The models around the layers have one precision.
        tier = None if name in (FLOOR, REST) else tier_of(bundle, self.runtime, precision)[0]
        step("building")
        build(bundle, self.target, self.cache, tier=tier, progress=lambda *_: step("building"))
        return load_runner(bundle, self.target, self.cache, tier=tier).runner


def profile(
    directory: Path,
    out: Path,
    *,
    target: str = "auto",
    precision: str | None = None,
    lengths: tuple[int, ...] = (),
    calls: int = 60,
    cache: Path | None = None,
    replace: bool = False,
    conditions: Conditions | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> LatencyTable:
    """Time the shapes of a directory, each in turns with the dense layer and a model that only copies its input.

    The file is whole after every shape. Timings that it holds already are kept, unless the device throttled then.

    Args:
        directory: from ``fewheads shapes``.
        out: the table.
        target: the runtime, as :func:`edge.runtimes.table.choose` takes it.
        precision: such as ``fp16`` or ``int8``; None is the runtime's first.
        lengths: tokens; empty for those of the directory.
        calls: of each model at each length.
        cache: the cache of builds; None is the default one.
        replace: whether a table with another key, or a file that is no table, is replaced.
        conditions: of this machine.
        on_progress: called at each step.

    Raises:
        UsageError: an option does not fit, the table in ``out`` has another key, or the power mode changed.
        BundleError: a bundle is missing or broken, or has no file for this runtime.
        BackendError: the runtime is missing, only builds, or cannot build a shape.
        GoldenError: a shape does not reproduce its golden outputs.
    """
    conditions = conditions or Conditions()
    shapes = ShapeSet.read(directory)
    lengths = shapes.check_lengths(lengths)
    runtime = choose(target)
    if runtime.build_only:
        given, expected = f"{runtime.name}:{runtime.device}", "a target that computes"
        raise UsageError("--target", given=given, expected=expected, fix="Take auto.")
    dense_bundle = open_bundle(directory, shapes.dense.name)
    precision = tier_of(dense_bundle, runtime, precision)[1]
    power_mode = conditions.power_mode()
    key = {
        "runtime": runtime.name,
        "runtime_version": runtime.version(),
        "provider": runtime.device,
        "precision": precision,
        "device": conditions.device(runtime.device),
        "power_mode": power_mode,
        **shapes.model,
    }
    table = _earlier(out, key, replace)
    missing = {shape: [n for n in lengths if not _good(table, shape, n)] for shape in shapes.shapes}
    rest = [n for n in lengths if not any(r.tokens == n and not r.throttled for r in table.rest)]
    work = [shape for shape, tokens in missing.items() if tokens]
    total = len(work) + bool(rest)
    machine = _Machine(directory, runtime, target, cache)
    runners: dict[str, Runner] = {}
    done, name = 0, shapes.dense.name

    def step(text: str) -> None:
        on_progress(Progress(done, total, name, text))

    def seconds_of(
        tokens: int, timed: Mapping[str, Runner], feeds: Mapping[str, Array]
    ) -> tuple[dict[str, Array], bool]:
        step(f"timing {tokens} tokens")
        found = _unthrottled(timed, feeds, calls, conditions)
        now = conditions.power_mode()
        if now != power_mode:
            raise UsageError(
                "power mode",
                given=now,
                expected=f"{power_mode!r}, as at the start",
                fix=f"Set it back and give the same command again; {out} keeps what was timed in {power_mode!r}.",
            )
        return found

    try:
        if total:
            runners["floor"] = machine.runner(FLOOR, precision, step)
            runners["dense"] = machine.runner(shapes.dense.name, precision, step)
        for shape in work:
            name = shape.name
            other = machine.runner(name, precision, step)
            try:
                for tokens in missing[shape]:
                    seconds, throttled = seconds_of(tokens, {**runners, "other": other}, _feeds(dense_bundle, tokens))
                    comparison = compared_above(seconds["floor"], seconds["dense"], seconds["other"])
                    table = _with_timing(table, Timing(shape, tokens, comparison, throttled))
            finally:
                other.close()
            _write(table, out)
            done += 1
        if rest:
            name = REST
            runners["rest"] = machine.runner(REST, precision, step)
            rest_bundle = open_bundle(directory, REST)
            for tokens in rest:
                layer = {key: runners[key] for key in ("floor", "dense")}
                seconds, hot = seconds_of(tokens, layer, _feeds(dense_bundle, tokens))
                own, too_hot = seconds_of(tokens, {"rest": runners["rest"]}, _feeds(rest_bundle, tokens))
                dense_seconds = float(np.median(seconds["dense"] - seconds["floor"]))
                median = float(np.median(own["rest"]))
                found = Rest(tokens, 1e3 * median, median / dense_seconds, hot or too_hot)
                others = tuple(one for one in table.rest if one.tokens != tokens)
                table = msgspec.structs.replace(table, rest=(*others, found))
            _write(table, out)
            done += 1
    finally:
        for runner in runners.values():
            runner.close()
    step("done")
    return table


def _earlier(out: Path, key: dict[str, str], replace: bool) -> LatencyTable:
    """Return the table to go on with: the one in the file, or an empty one."""
    if not out.exists():
        return LatencyTable(key=key)
    try:
        table = LatencyTable.read(out)
        fix = "Give another --out for this machine, or --replace."
        check_key(f"--out {out}", table.key | {"label": table.label}, key | {"label": "measured"}, fix)
    except UsageError:
        if replace:
            return LatencyTable(key=key)
        raise
    return table


def _good(table: LatencyTable, shape: object, tokens: int) -> bool:
    return any(t.shape == shape and t.tokens == tokens and not t.throttled for t in table.timings)


def _with_timing(table: LatencyTable, timing: Timing) -> LatencyTable:
    others = tuple(t for t in table.timings if (t.shape, t.tokens) != (timing.shape, timing.tokens))
    return msgspec.structs.replace(table, timings=(*others, timing))


def _write(table: LatencyTable, out: Path) -> None:
    try:
        table.write(out)
    except OSError as error:
        fix = "Make room, or give another --out."
        raise UsageError(f"--out {out}", given=Literally(error), expected="a file to write", fix=fix) from None


def _unthrottled(
    runners: Mapping[str, Runner], feeds: Mapping[str, Array], calls: int, conditions: Conditions
) -> tuple[dict[str, Array], bool]:
    """Return the seconds of all runners, and whether the device throttled in every attempt."""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_COOL_DOWN_SECONDS)
        before = conditions.throttling()
        seconds = times_in_turns(runners, feeds, calls)
        if not conditions.throttling().since(before):
            return seconds, False
    return seconds, True


def _feeds(bundle: Bundle, tokens: int) -> dict[str, Array]:
    """Return one input of a length: the golden one, repeated or cut along the dimension of the tokens."""
    feeds = {}
    for spec in bundle.manifest.inputs:
        golden = bundle.golden.inputs[spec.name][:1]
        if -1 in spec.shape[1:]:
            axis = spec.shape.index(-1, 1)
            golden = np.take(golden, np.arange(tokens) % golden.shape[axis], axis=axis)
        feeds[spec.name] = np.ascontiguousarray(golden.astype(NUMPY_TYPES[spec.datatype], copy=False))
    return feeds
