"""Builds a bundle's model into the cache, loads it from there, and checks its golden outputs."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edge.bundles.bundle import Bundle
from edge.bundles.golden import GoldenReport
from edge.bundles.manifest import Artifact
from edge.errors import BackendError, Literally
from edge.runner import Runner
from edge.runtimes import build_memory, cache
from edge.runtimes.build_child import build_in_child
from edge.runtimes.cache import BuildRecord, Cached
from edge.runtimes.local_build import Built, build_here, check_fusion, load_checked
from edge.runtimes.runtime import BuildOptions, Progress, Runtime, Source
from edge.runtimes.table import first_that_works

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A model that has reproduced its golden set.

    Attributes:
        runner: computes it.
        golden_report: the comparison with the golden set.
        runtime: the runtime that loaded it.
        artifact: the file that it computes.
        row_independent: whether a row's outputs do not depend on the other rows of its run.
        source: whether it was read from the cache or straight from the bundle.
        record: of the build in the cache; None where it was read from the bundle.
    """

    runner: Runner
    golden_report: GoldenReport
    runtime: Runtime
    artifact: Artifact
    row_independent: bool
    source: Literal["cache", "bundle"]
    record: BuildRecord | None = None


def build(
    bundle: Bundle,
    target: str = "auto",
    cache_dir: Path | None = None,
    *,
    tier: str | None = None,
    options: BuildOptions = BuildOptions(),  # noqa: B008 - it is frozen
    replace: bool = False,
    progress: Progress | None = None,
) -> Built:
    """Build a model, check it, and put it into the cache. A build that the cache holds is not repeated.

    With the target ``auto``, a model that one runtime cannot build is built for the next one.

    Args:
        bundle: the model.
        target: the runtime, as :func:`edge.runtimes.table.choose` takes it.
        cache_dir: the cache; None is the default one.
        tier: the size of the model; None is the full one.
        options: how to build.
        replace: whether to build again what the cache holds.
        progress: called during a long build.

    Raises:
        UsageError: there is no such target, or the cache cannot be written.
        BundleError: the bundle contradicts itself.
        BackendError: the runtime is missing, or cannot build the model, or not as the options require.
        GoldenError: the build does not reproduce the golden outputs. It is not kept.
    """
    bundle.tier(tier)  # an unknown one is no reason to try another runtime
    return first_that_works(
        target,
        str(bundle.path),
        lambda runtime: build_with(runtime, bundle, cache_dir, tier, options, replace, progress),
    )


def build_with(
    runtime: Runtime,
    bundle: Bundle,
    cache_dir: Path | None,
    tier: str | None,
    options: BuildOptions = BuildOptions(),  # noqa: B008 - it is frozen
    replace: bool = False,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Built:
    """Build a model for one runtime; see :func:`build`.

    Args:
        runtime: builds and checks it, in a child process where it asks for one.
        bundle: the model.
        cache_dir: the cache.
        tier: the size of the model.
        options: how to build.
        replace: whether to build again what the cache holds.
        progress: called during the build.
        stop: ends a build in a child process when another thread sets it.

    Raises:
        FewheadsError: as :func:`build`, or :func:`edge.runtimes.build_child.build_in_child`.
    """
    source = Source.of(bundle, runtime, tier)
    key = cache.key_of(source, runtime)
    directory = cache.entry(cache_dir, key)
    found = None if replace else cache.find(directory, key)
    if found:
        check_fusion(runtime, source, found.record.engine, options)
        return Built(directory, found.record, reused=True)
    other = None if replace else cache.nearest(cache_dir, key)
    if other:
        log.info("%s is built again: the cache has a build for %s, and this is %s", source.subject, *other)
    build_memory.check(runtime, source, options)
    if not runtime.isolated_build:
        return build_here(runtime, source, cache_dir, options, progress)
    build_in_child(runtime, source, cache_dir, options, progress, stop)
    built = cache.find(directory, key)
    if not built:
        fix = "Build it again, on a disk that is sound."
        raise BackendError(source.subject, given=Literally("none"), expected=f"its build in {directory}", fix=fix)
    return Built(directory, built.record, reused=False)


def find_build(runtime: Runtime, source: Source, cache_dir: Path | None) -> Cached | None:
    """Return the build of a model that the cache holds for a runtime, read and checked; None where it has none.

    Raises:
        BackendError: the runtime is missing.
    """
    key = cache.key_of(source, runtime)
    return cache.find(cache.entry(cache_dir, key), key)


def is_built(runtime: Runtime, bundle: Bundle, cache_dir: Path | None) -> bool:
    """Return whether the cache has a build of every tier of a bundle for a runtime.

    Raises:
        BundleError: a tier has no file for this runtime.
        BackendError: the runtime is missing.
    """
    sources = [Source.of(bundle, runtime, tier.name) for tier in bundle.manifest.tiers]
    return all(cache.has(cache.entry(cache_dir, cache.key_of(source, runtime))) for source in sources)


def load_runner(
    bundle: Bundle, target: str = "auto", cache_dir: Path | None = None, *, tier: str | None = None
) -> Loaded:
    """Load a model to serve it: the build in the cache, or else the bundle's own ONNX file.

    With the target ``auto``, a model that one runtime cannot load is loaded by the next one.

    Args:
        bundle: the model.
        target: the runtime, as :func:`edge.runtimes.table.choose` takes it.
        cache_dir: the cache; None is the default one.
        tier: the size of the model; None is the full one.

    Raises:
        UsageError: there is no such target, or it only builds.
        BundleError: the model is broken, or its tensors are not those of the manifest.
        BackendError: the runtime is missing, or needs a build that the cache has not.
        GoldenError: the model does not reproduce the golden outputs.
    """
    bundle.tier(tier)
    return first_that_works(target, str(bundle.path), lambda runtime: load_with(runtime, bundle, cache_dir, tier=tier))


def load_with(runtime: Runtime, bundle: Bundle, cache_dir: Path | None, *, tier: str | None = None) -> Loaded:
    """Load a model with one runtime; see :func:`load_runner`."""
    source = Source.of(bundle, runtime, tier)
    found = find_build(runtime, source, cache_dir)
    if runtime.isolated_build and not found:
        raise _not_built(runtime, source, cache_dir)
    runner, report = load_checked(runtime, source, found.product if found else None)
    read_from: Literal["cache", "bundle"] = "cache" if found else "bundle"
    name = f"{bundle.manifest.name} {bundle.manifest.version}"
    log.info("%s was read from the %s. %s", name, read_from, runtime.reason)
    record = found.record if found else None
    for warning in record.engine.notes if record and record.engine else ():
        log.warning("the engine of %s (tier %s): %s", name, source.tier.name, warning)
    independent = runtime.row_independent(source.artifact)
    return Loaded(runner, report, runtime, source.artifact, independent, read_from, record)


def _not_built(runtime: Runtime, source: Source, cache_dir: Path | None) -> BackendError:
    """Return the error of a model without a build for this machine, with the command that makes one."""
    other = cache.nearest(cache_dir, cache.key_of(source, runtime))
    place = cache.cache_directory(cache_dir)
    given, expected = other or (f"no build in {place}", "one for this machine")
    command = runtime.build_command(source) + (f" --cache {cache_dir}" if cache_dir else "")
    return BackendError(
        f"{source.subject} for {runtime.name}",
        given=Literally(f"a build for {given}" if other else given),
        expected=f"a build for {expected}" if other else expected,
        fix=f"Build it on this machine: {command}",
    )
