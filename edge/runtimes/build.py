"""Builds of models: compiled, checked against the golden set, kept in the cache, and loaded from there."""

from __future__ import annotations

import logging
import platform
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from edge import __version__
from edge.bundles.bundle import Bundle
from edge.bundles.fields import Role
from edge.bundles.golden import GoldenReport, check_runner
from edge.bundles.manifest import Artifact
from edge.bundles.preprocess import preprocessor
from edge.datatypes import TensorSpec
from edge.errors import BackendError, BundleError, Raw
from edge.files import replaced_directory, sha256
from edge.runner import Runner
from edge.runtimes import cache
from edge.runtimes.build_child import build_in_child, check_memory
from edge.runtimes.cache import BuildRecord
from edge.runtimes.runtime import BuildOptions, BuildProgress, EngineReport, Product, Progress, Runtime, Source
from edge.runtimes.table import first_that_works

log = logging.getLogger(__name__)

#: Seconds between two reports: a compiler takes thousands of steps.
_REPORT_SECONDS = 0.1
#: No estimate of the time left before this fraction is done.
_ESTIMATED_FROM = 0.02
#: The share of compilation in a build; the rest is for the golden check and the disk.
_COMPILED = 0.95


class Built(NamedTuple):
    """A build in the cache: its directory, its record, and whether an earlier call made it."""

    directory: Path
    record: BuildRecord
    reused: bool


@dataclass(frozen=True)
class Loaded:
    """A loaded model that has reproduced its golden set."""

    runner: Runner
    golden_report: GoldenReport
    runtime: Runtime
    artifact: Artifact
    row_independent: bool  # a row's outputs do not depend on the other rows of its run
    source: Literal["cache", "bundle"]
    record: BuildRecord | None = None  # of the build in the cache


def build(
    bundle: Bundle,
    target: str = "auto",
    cache_dir: Path | None = None,
    *,
    tier: str | None = None,
    role: Role = "model",
    options: BuildOptions = BuildOptions(),  # noqa: B008 - it is frozen
    replace: bool = False,
    progress: Progress | None = None,
) -> Built:
    """Build a model, check it, and keep it in the cache. A build that the cache has is not repeated.

    With the target ``auto``, a model that one runtime cannot build is built for the next one. ``replace`` repeats a
    build that the cache has. No tier is the full one; no ``cache_dir`` is the default cache.

    Raises:
        UsageError: there is no such target, or the cache cannot be written.
        BundleError: the bundle contradicts itself.
        BackendError: the runtime is missing, or cannot build the model, or not as the options require.
        GoldenError: the build does not reproduce the golden outputs. It is not kept.
    """
    bundle.tier(tier)  # an unknown tier is not a reason to try another runtime
    given = (bundle, cache_dir, tier, role, options, replace, progress)
    return first_that_works(target, str(bundle.path), lambda runtime: build_with(runtime, *given))


def build_with(
    runtime: Runtime,
    bundle: Bundle,
    cache_dir: Path | None,
    tier: str | None,
    role: Role = "model",
    options: BuildOptions = BuildOptions(),  # noqa: B008 - it is frozen
    replace: bool = False,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Built:
    """Build a model for one runtime, in a child process if the runtime requires it; see :func:`build`.

    Another thread can end a build in a child process by setting ``stop``, which raises LoadFailed.
    """
    source = Source.of(bundle, runtime, tier, role)
    key = cache.key_of(source, runtime)
    directory = cache.entry(cache_dir, key)
    cached = None if replace else cache.find(directory, key)
    if cached:
        _check_fusion(runtime, source, cached[0].engine, options)
        return Built(directory, cached[0], reused=True)
    if not replace and (differences := cache.nearest(cache_dir, key)):
        log.info("%s is built again: the cache has a build for %s, and this is %s", source.subject, *differences)
    check_memory(runtime, source, options)
    if not runtime.isolated_build:
        return build_here(runtime, source, cache_dir, options, progress)
    build_in_child(runtime, source, cache_dir, options, progress, stop)
    built = cache.find(directory, key, record_only=True)
    if not built:
        fix = "Build it again, on a disk that is sound."
        raise BackendError(source.subject, given=Raw("none"), expected=f"its build in {directory}", fix=fix)
    return Built(directory, built[0], reused=False)


def build_here(
    runtime: Runtime, source: Source, cache_dir: Path | None, options: BuildOptions, progress: Progress | None
) -> Built:
    """Build a model in this process; see :func:`build`. Nothing of a failed build is kept."""
    meter = _Meter(progress)
    key = cache.key_of(source, runtime)
    directory = cache.entry(cache_dir, key)
    try:
        cache.clean(cache_dir)
        # Opened before the work, so that a cache that cannot be written fails at once.
        with replaced_directory(directory) as new:
            if not runtime.build_only:
                preprocessor(source.bundle)  # a model that accepts no request is not worth a build
            options = msgspec.structs.replace(options, timing_cache=cache.timing_cache(cache_dir, runtime))
            product = runtime.build(source, options, lambda at: meter.report(at.phase, at.fraction * _COMPILED))
            _check_fusion(runtime, source, product.report, options)
            # The bytes that are written are loaded later, so the check must load the same bytes.
            golden = None
            if not runtime.build_only:
                meter.report("golden check", _COMPILED)
                runner, golden = _load_checked(runtime, source, product)
                runner.close()
            record = BuildRecord(
                name=source.bundle.manifest.name,
                version=source.bundle.manifest.version,
                tier=source.tier.name,
                onnx_sha256=source.onnx_sha256,
                runtime=runtime.name,
                runtime_version=runtime.version(),
                device=runtime.device,
                reason=runtime.reason,
                machine=platform.machine(),
                fewheads_version=__version__,
                file=product.file,
                sha256=sha256(product.data),
                size_bytes=len(product.data),
                seconds=time.monotonic() - meter.began,
                key=key,
                golden=golden,
                golden_skipped=None if golden else f"golden check not run: it needs a GPU of {runtime.device}",
                engine=product.report,
            )
            cache.write(new, record, product.data)
    except OSError as error:
        raise cache.unwritable(directory.parent, error) from None
    meter.report("done", 1.0)
    return Built(directory, record, reused=False)


def has_build(runtime: Runtime, source: Source, cache_dir: Path | None, *, record_only: bool = True) -> bool:
    """Return whether the cache has a build of a model; by its record alone, it may be broken."""
    key = cache.key_of(source, runtime)
    return cache.find(cache.entry(cache_dir, key), key, record_only=record_only) is not None


def load_runner(
    bundle: Bundle,
    target: str = "auto",
    cache_dir: Path | None = None,
    *,
    tier: str | None = None,
    role: Role = "model",
) -> Loaded:
    """Load a model to serve it: the build in the cache, or else the bundle's own ONNX file.

    With the target ``auto``, a model that one runtime cannot load is loaded by the next one.

    Raises:
        UsageError: there is no such target, or it only builds.
        BundleError: the model is broken, or its tensors are not those of the manifest.
        BackendError: the runtime is missing, or needs a build that the cache does not have.
        GoldenError: the model does not reproduce the golden outputs.
    """
    bundle.tier(tier)
    return first_that_works(target, str(bundle.path), lambda runtime: load_with(runtime, bundle, cache_dir, tier, role))


def load_with(
    runtime: Runtime, bundle: Bundle, cache_dir: Path | None, tier: str | None = None, role: Role = "model"
) -> Loaded:
    """Load a model with one runtime; see :func:`load_runner`."""
    source = Source.of(bundle, runtime, tier, role)
    key = cache.key_of(source, runtime)
    cached = cache.find(cache.entry(cache_dir, key), key)
    if runtime.isolated_build and not cached:
        raise not_built(runtime, source, cache_dir)
    record, product = cached or (None, None)
    runner, report = _load_checked(runtime, source, product)
    read_from: Literal["cache", "bundle"] = "cache" if cached else "bundle"
    name = f"{bundle.manifest.name} {bundle.manifest.version}"
    log.info("%s was read from the %s. %s", name, read_from, runtime.reason)
    for warning in record.engine.notes if record and record.engine else ():
        log.warning("the engine of %s (tier %s): %s", name, source.tier.name, warning)
    independent = runtime.row_independent(source.artifact)
    return Loaded(runner, report, runtime, source.artifact, independent, read_from, record)


def not_built(runtime: Runtime, source: Source, cache_dir: Path | None) -> BackendError:
    """Return the error of a model that a runtime cannot load, because the cache has no build of it."""
    given, expected = f"no build in {cache.cache_directory(cache_dir)}", "one for this machine"
    if differences := cache.nearest(cache_dir, cache.key_of(source, runtime)):
        given, expected = (f"a build for {side}" for side in differences)
    command = runtime.build_command(source) + (f" --cache {cache_dir}" if cache_dir else "")
    subject, fix = f"{source.subject} for {runtime.name}", f"Build it on this machine: {command}"
    return BackendError(subject, given=Raw(given), expected=expected, fix=fix)


def _check_fusion(runtime: Runtime, source: Source, engine: EngineReport | None, options: BuildOptions) -> None:
    if not options.require_fused_attention or (engine and engine.all_fused):
        return
    given = engine.attention if engine else f"a build for {runtime.name}, which does not show its kernels"
    mend = "Export FP16 heads of 16 to 256 features, as many for queries as for values"
    fix = f"{mend if engine else 'Build with --target tensorrt'}, or leave the option out."
    expected = "every block fused, as --require-fused-attention demands"
    raise BackendError(f"{source.subject} attention", given=Raw(given), expected=expected, fix=fix)


def _load_checked(runtime: Runtime, source: Source, built: Product | None) -> tuple[Runner, GoldenReport]:
    """Load a model, and check its tensors and its golden outputs. After an error nothing stays loaded."""
    runner = runtime.load(source, built)
    try:
        _check_tensors(f"{source.subject} inputs", runner.inputs, source.tensors.inputs)
        _check_tensors(f"{source.subject} outputs", runner.outputs, source.tensors.outputs)
        golden = source.bundle.golden_of(source.tier, source.artifact)
        max_rows = source.bundle.manifest.batch_size(source.artifact)
        return runner, check_runner(runner, golden, source.artifact.tolerance, source.subject, max_rows)
    except BaseException:
        runner.close()
        raise


def _check_tensors(subject: str, given: tuple[TensorSpec, ...], stated: tuple[TensorSpec, ...]) -> None:
    if set(given) != set(stated):  # the order of a graph's tensors has no meaning
        expected = f"{_listed(stated)}, as the manifest says"
        fix = "Export the bundle again; do not edit it by hand."
        raise BundleError(subject, given=Raw(_listed(given)), expected=expected, fix=fix)


def _listed(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in specs)


class _Meter:
    """Reports the progress of a build, at most ten times a second, with the estimated time left."""

    def __init__(self, report: Progress | None) -> None:
        self._report = report
        self.began = time.monotonic()
        self._reported = -_REPORT_SECONDS
        self._fraction = 0.0

    def report(self, phase: str, fraction: float) -> None:
        self._fraction = max(self._fraction, min(fraction, 1.0))
        now = time.monotonic()
        if self._report and (now - self._reported >= _REPORT_SECONDS or self._fraction >= _COMPILED):
            self._reported = now
            left = (now - self.began) * (1 / self._fraction - 1) if self._fraction >= _ESTIMATED_FROM else None
            self._report(BuildProgress(phase, self._fraction, left))
