"""Builds a bundle's model into the cache, loads it from there, and checks its golden outputs."""

from __future__ import annotations

import logging
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from edge import __version__
from edge.bundles.bundle import Bundle
from edge.bundles.golden import GoldenReport, check_runner
from edge.bundles.preprocess import preprocessor
from edge.datatypes import TensorSpec
from edge.errors import BundleError, Literally, UsageError
from edge.files import replaced_directory, sha256
from edge.runner import Runner
from edge.runtimes import cache
from edge.runtimes.cache import BuildRecord
from edge.runtimes.runtime import Progress, Runtime, Source
from edge.runtimes.table import choose

log = logging.getLogger(__name__)

_EXPORT_AGAIN = "Export the bundle again; do not edit it by hand."


class Built(NamedTuple):
    """A build in the cache: its directory, its record, and whether an earlier call made it."""

    directory: Path
    record: BuildRecord
    reused: bool


@dataclass(frozen=True)
class Loaded:
    """A model that has reproduced its golden set.

    Attributes:
        runner: computes it.
        golden_report: the comparison with the golden set.
        runtime: the runtime that loaded it.
        row_independent: whether a row's outputs do not depend on the other rows of its run.
        source: whether it was read from the cache or straight from the bundle.
    """

    runner: Runner
    golden_report: GoldenReport
    runtime: Runtime
    row_independent: bool
    source: Literal["cache", "bundle"]


def build(
    bundle: Bundle,
    target: str = "auto",
    cache_dir: Path | None = None,
    *,
    tier: str | None = None,
    progress: Progress | None = None,
) -> Built:
    """Build a model, check it, and put it into the cache. A build that the cache holds is not repeated.

    Args:
        bundle: the model.
        target: the runtime, as :func:`edge.runtimes.table.choose` takes it.
        cache_dir: the cache; None is the default one.
        tier: the size of the model; None is the full one.
        progress: called during a long build.

    Raises:
        UsageError: there is no such target, or the cache cannot be written.
        BundleError: the bundle contradicts itself.
        BackendError: the runtime is missing, or cannot build the model.
        GoldenError: the build does not reproduce the golden outputs. It is not kept.
    """
    runtime = choose(target)
    source = Source.of(bundle, runtime, tier)
    directory = cache.entry(cache_dir, source, runtime)
    found = cache.find(directory, source.onnx_sha256)
    if found:
        return Built(directory, found.record, reused=True)
    started = time.perf_counter()
    try:
        # Opened before the work, so that a cache that cannot be written is known at once.
        with replaced_directory(directory) as new:
            if not runtime.build_only:
                preprocessor(bundle)  # a model that can take no request is not worth a build
            product = runtime.build(source, progress)
            # The bytes that are written are loaded later, so they are what has to pass.
            golden = None
            if not runtime.build_only:
                runner, golden = _load(runtime, source, product.data)
                runner.close()
            record = BuildRecord(
                name=bundle.manifest.name,
                version=bundle.manifest.version,
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
                seconds=time.perf_counter() - started,
                golden=golden,
                golden_skipped=None if golden else f"golden check not run: it needs a GPU of {runtime.device}",
                engine=product.engine,
            )
            cache.write(new, record, product.data)
    except OSError as error:
        fix = "Give another directory with --cache or FEWHEADS_CACHE, or make room in this one."
        expected = f"a cache at {directory.parent} that can be written"
        raise UsageError("--cache", given=Literally(error), expected=expected, fix=fix) from None
    return Built(directory, record, reused=False)


def load_runner(
    bundle: Bundle, target: str = "auto", cache_dir: Path | None = None, *, tier: str | None = None
) -> Loaded:
    """Load a model to serve it: the build in the cache, or else the bundle's own ONNX file.

    Args:
        bundle: the model.
        target: the runtime, as :func:`edge.runtimes.table.choose` takes it.
        cache_dir: the cache; None is the default one.
        tier: the size of the model; None is the full one.

    Raises:
        UsageError: there is no such target, or it only builds.
        BundleError: the model is broken, or its tensors are not those of the manifest.
        BackendError: the runtime is missing.
        GoldenError: the model does not reproduce the golden outputs.
    """
    runtime = choose(target)
    source = Source.of(bundle, runtime, tier)
    found = cache.find(cache.entry(cache_dir, source, runtime), source.onnx_sha256)
    runner, report = _load(runtime, source, found.data if found else None)
    read_from: Literal["cache", "bundle"] = "cache" if found else "bundle"
    log.info("%s %d was read from the %s. %s", bundle.manifest.name, bundle.manifest.version, read_from, runtime.reason)
    return Loaded(runner, report, runtime, runtime.row_independent(source.artifact), read_from)


def _load(runtime: Runtime, source: Source, built: bytes | None) -> tuple[Runner, GoldenReport]:
    runner = runtime.load(source, built)
    try:
        return runner, _verify(runner, source)
    except BaseException:
        runner.close()
        raise


def _verify(runner: Runner, source: Source) -> GoldenReport:
    _check_tensors(f"{source.subject} inputs", runner.inputs, source.tensors.inputs)
    _check_tensors(f"{source.subject} outputs", runner.outputs, source.tensors.outputs)
    golden, max_rows = source.bundle.goldens[source.tier.name], source.bundle.manifest.max_batch_size
    return check_runner(runner, golden, source.artifact.tolerance, source.subject, max_rows)


def _check_tensors(subject: str, found: tuple[TensorSpec, ...], stated: tuple[TensorSpec, ...]) -> None:
    # By name: the order of a graph's tensors has no meaning.
    if {spec.name: spec for spec in found} != {spec.name: spec for spec in stated}:
        expected = f"{_listed(stated)}, as the manifest says"
        raise BundleError(subject, given=Literally(_listed(found)), expected=expected, fix=_EXPORT_AGAIN)


def _listed(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in specs)
