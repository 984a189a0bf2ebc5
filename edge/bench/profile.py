"""Latencies of the layer shapes of a directory on this machine, without torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from edge.bench.conditions import BoardState, device_name, power_mode
from edge.bench.layer_latencies import LayerLatencies, Rest, Shape, Timing, check_key, read_json
from edge.bench.timing import compared_above, times_in_turns
from edge.bundles.bundle import Bundle
from edge.datatypes import NUMPY_TYPES, Array
from edge.errors import UsageError
from edge.runner import Runner
from edge.runtimes.build import build, load_runner
from edge.runtimes.runtime import Runtime
from edge.runtimes.table import choose_to_run

SHAPES_NAME = "shapes.json"
FLOOR, REST = "floor", "rest"
#: Number of timings of a shape while the device throttles; the last one is kept and marked.
_ATTEMPTS = 3
_COOL_DOWN_SECONDS = 5.0


class ShapeSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``shapes.json`` of the directory.

    The directory has a bundle for each shape, under its name; ``floor``, which only copies a layer's input; and
    ``rest``, embeddings and task head of the model.
    """

    model: dict[str, str]  # what determines the times: architecture, width, dense layer and embeddings
    dense: Shape
    shapes: tuple[Shape, ...]  # with the dense one
    lengths: tuple[int, ...]  # tokens of the inputs; runtimes tune for their range
    format_version: Literal[1] = 1

    @classmethod
    def read(cls, directory: Path) -> ShapeSet:
        """Read the file of a directory; raise a UsageError if it is missing or malformed."""
        path, fix = directory / SHAPES_NAME, "Write the directory again with 'fewheads shapes'."
        subject, expected, prefix = f"shapes {directory}", f"a directory with {SHAPES_NAME}", f"{SHAPES_NAME}: "
        return read_json(path, cls, subject=subject, expected=expected, fix=fix, prefix=prefix)


#: Receives the number of finished and of all shapes, the present shape, and its step.
OnProgress = Callable[[int, int, str, str], None]


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
    root: Path = Path("/"),
    on_progress: OnProgress = lambda done, shapes, name, step: None,
) -> LayerLatencies:
    """Time the shapes of a directory, each in turns with the dense layer and a model that only copies its input.

    The file is complete after every shape. Its earlier timings are kept, unless the device throttled during them.

    Args:
        precision: such as ``fp16`` or ``int8``; None is the runtime's first.
        lengths: tokens; empty for those of the directory.
        calls: number of calls of each model at each length.
        replace: whether to replace a table with another key, or a file that is not a table.
        root: the root of the board's files, another one in tests.

    Raises:
        UsageError: an option does not fit, ``out`` has another key, or the power mode is unknown or changed.
        FewheadsError: as :func:`edge.runtimes.build.build`.
    """
    shapes = ShapeSet.read(directory)
    least, most = min(shapes.lengths), max(shapes.lengths)
    for tokens in lengths:
        if not least <= tokens <= most:
            expected = f"{least} to {most}, the range of the bundles"
            fix = "Give a length in this range, or write the shapes again with 'fewheads shapes --lengths'."
            raise UsageError("--lengths", given=tokens, expected=expected, fix=fix)
    runtime = choose_to_run(target)
    precision = _tier_of(Bundle.open(directory / shapes.dense.name), runtime, precision)[1]
    key = {
        "runtime": runtime.name,
        "runtime_version": runtime.version(),
        "provider": runtime.device,
        "precision": precision,
        "device": device_name(runtime.device, root),
        "power_mode": power_mode(root),
        **shapes.model,
    }
    table = _earlier(out, key, replace)
    # auto would time a shape that this runtime cannot build on another one.
    named = runtime.name if target == "auto" else target
    run = _Run(directory, out, runtime, named, precision, cache, calls, root, table, on_progress)
    run.time(shapes, tuple(dict.fromkeys(lengths)) or shapes.lengths)
    return run.table


@dataclass
class _Run:
    """One run: its options, the table so far, its position, and the present shape."""

    directory: Path
    out: Path
    runtime: Runtime
    target: str
    precision: str
    cache: Path | None
    calls: int
    root: Path
    table: LayerLatencies
    on_progress: OnProgress
    done: int = 0
    shapes: int = 0
    name: str = ""

    def time(self, shapes: ShapeSet, lengths: tuple[int, ...]) -> None:
        """Time the shapes and lengths that are missing in the table, and write it after each shape."""
        good = {(t.shape, t.tokens) for t in self.table.timings if not t.throttled}
        missing = {shape: [n for n in lengths if (shape, n) not in good] for shape in shapes.shapes}
        missing = {shape: tokens for shape, tokens in missing.items() if tokens}
        good_rest = {rest.tokens for rest in self.table.rest if not rest.throttled}
        rest = [n for n in lengths if n not in good_rest]
        if not missing and not rest:
            return
        self.shapes = len(missing) + bool(rest)
        dense = Bundle.open(self.directory / shapes.dense.name)
        with closing(self._load(FLOOR)) as floor, closing(self._load(shapes.dense.name)) as whole:
            layers = {"floor": floor, "dense": whole}
            for shape, wanted in missing.items():
                with closing(self._load(shape.name)) as other:
                    for tokens in wanted:
                        seconds, throttled = self._seconds(tokens, {**layers, "other": other}, dense)
                        comparison = compared_above(seconds["floor"], seconds["dense"], seconds["other"])
                        self._add("timings", Timing(shape, tokens, comparison, throttled))
                self._write()
            if rest:
                with closing(self._load(REST)) as model:
                    for tokens in rest:
                        seconds, hot = self._seconds(tokens, layers, dense)
                        of_rest, too_hot = self._seconds(tokens, {REST: model}, Bundle.open(self.directory / REST))
                        median = float(np.median(of_rest[REST]))
                        dense_layers = median / float(np.median(seconds["dense"] - seconds["floor"]))
                        self._add("rest", Rest(tokens, 1e3 * median, dense_layers, hot or too_hot))
                self._write()

    def _load(self, name: str) -> Runner:
        """Build a bundle, unless it is in the cache, and load it."""
        bundle = Bundle.open(self.directory / name)
        # The models around the layers have a single precision.
        tier = None if name in (FLOOR, REST) else _tier_of(bundle, self.runtime, self.precision)[0]
        self.name = name
        self._step("building")
        build(bundle, self.target, self.cache, tier=tier, progress=lambda *_: self._step("building"))
        return load_runner(bundle, self.target, self.cache, tier=tier).runner

    def _seconds(self, tokens: int, runners: Mapping[str, Runner], bundle: Bundle) -> tuple[dict[str, Array], bool]:
        """Return the seconds of all runners, call by call, and whether the device throttled in all attempts."""
        feeds = _feeds(bundle, tokens)
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_COOL_DOWN_SECONDS)
            self._step(f"timing {tokens} tokens")
            before = BoardState.read(self.root)
            seconds = times_in_turns(runners, feeds, self.calls)
            throttled = bool(BoardState.read(self.root).throttling(before))
            if not throttled:
                break
        now, started = power_mode(self.root), self.table.key["power_mode"]
        if now != started:
            fix = f"Set it back and run the same command again; {self.out} keeps the timings in {started!r}."
            raise UsageError("power mode", given=now, expected=f"{started!r}, as at the start", fix=fix)
        return seconds, throttled

    def _add(self, field: str, new: Timing | Rest) -> None:
        """Add a timing to the table, or replace an earlier one."""
        shape = getattr(new, "shape", None)
        kept = [t for t in getattr(self.table, field) if (getattr(t, "shape", None), t.tokens) != (shape, new.tokens)]
        self.table = msgspec.structs.replace(self.table, **{field: (*kept, new)})

    def _write(self) -> None:
        self.table.write(self.out)
        self.done += 1
        self._step("written")

    def _step(self, step: str) -> None:
        self.on_progress(self.done, self.shapes, self.name, step)


def _tier_of(bundle: Bundle, runtime: Runtime, precision: str | None) -> tuple[str, str]:
    """Return the tier of a shape's bundle that has a precision, and the precision; None takes the first tier's."""
    tiers: dict[str, str] = {}
    for tier in bundle.manifest.tiers:
        tiers.setdefault(bundle.artifact(runtime.artifact_runtime, tier.name).precision, tier.name)
    chosen = precision or next(iter(tiers))
    if chosen not in tiers:
        subject, expected = f"--precision for {runtime.name}", f"one of {', '.join(tiers)}"
        raise UsageError(subject, given=chosen, expected=expected, fix="Give one of these, or another --target.")
    return tiers[chosen], chosen


def _earlier(out: Path, key: dict[str, str], replace: bool) -> LayerLatencies:
    """Return the table in the file, or an empty one."""
    with suppress(UsageError) if replace else nullcontext():
        if out.exists():
            table = LayerLatencies.read(out)
            fix = "Give another --out for this machine, or --replace."
            check_key(f"--out {out}", table.key | {"label": table.label}, key | {"label": "measured"}, fix)
            return table
    return LayerLatencies(key=key)


def _feeds(bundle: Bundle, tokens: int) -> dict[str, Array]:
    """Return an input of a length: the golden one, repeated or cut along the dimension of the tokens."""
    feeds = {}
    for spec in bundle.manifest.inputs:
        golden = bundle.golden.inputs[spec.name][:1]
        if -1 in spec.shape[1:]:
            axis = spec.shape.index(-1, 1)
            golden = np.take(golden, np.arange(tokens) % golden.shape[axis], axis=axis)
        feeds[spec.name] = np.ascontiguousarray(golden.astype(NUMPY_TYPES[spec.datatype], copy=False))
    return feeds
