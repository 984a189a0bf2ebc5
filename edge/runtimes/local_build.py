"""One build in this process: compiled, checked against the golden set, and written into the cache."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge import __version__
from edge.bundles.golden import GoldenReport, check_runner
from edge.bundles.preprocess import preprocessor
from edge.datatypes import TensorSpec
from edge.errors import BackendError, BundleError, Literally
from edge.files import replaced_directory, sha256
from edge.runner import Runner
from edge.runtimes import cache
from edge.runtimes.build_progress import COMPILED, Meter
from edge.runtimes.cache import BuildRecord
from edge.runtimes.runtime import BuildOptions, EngineReport, Product, Progress, Runtime, Source

_EXPORT_AGAIN = "Export the bundle again; do not edit it by hand."


class Built(NamedTuple):
    """A build in the cache: its directory, its record, and whether an earlier call made it."""

    directory: Path
    record: BuildRecord
    reused: bool


def build_here(
    runtime: Runtime,
    source: Source,
    cache_dir: Path | None,
    options: BuildOptions = BuildOptions(),  # noqa: B008 - it is frozen
    progress: Progress | None = None,
) -> Built:
    """Build a model in this process and put it into the cache; nothing is kept of a build that fails.

    Args:
        runtime: builds and checks it.
        source: the model.
        cache_dir: the cache; None is the default one.
        options: how to build.
        progress: called during the build.

    Raises:
        UsageError: the cache cannot be written.
        BundleError: the bundle contradicts itself.
        BackendError: the runtime cannot build the model, or not as the options require.
        GoldenError: the build does not reproduce the golden outputs.
    """
    meter = Meter(progress)
    key = cache.key_of(source, runtime)
    directory = cache.entry(cache_dir, key)
    try:
        cache.clean(cache_dir)
        # Opened before the work, so that a cache that cannot be written is known at once.
        with replaced_directory(directory) as new:
            if not runtime.build_only:
                preprocessor(source.bundle)  # a model that can take no request is not worth a build
            options = msgspec.structs.replace(options, timing_cache=cache.timing_cache(cache_dir, runtime))
            product = runtime.build(source, options, meter.compiled)
            check_fusion(runtime, source, product.engine, options)
            # The bytes that are written are loaded later, so they are what has to pass.
            golden = None
            if not runtime.build_only:
                meter.at("golden check", COMPILED)
                runner, golden = load_checked(runtime, source, product)
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
                seconds=meter.seconds,
                key=key,
                golden=golden,
                golden_skipped=None if golden else f"golden check not run: it needs a GPU of {runtime.device}",
                engine=product.engine,
            )
            cache.write(new, record, product.data)
    except OSError as error:
        raise cache.unwritable(directory.parent, error) from None
    meter.at("done", 1.0)
    return Built(directory, record, reused=False)


def check_fusion(runtime: Runtime, source: Source, engine: EngineReport | None, options: BuildOptions) -> None:
    """Check that the attention of a build is fused where the options require it.

    Raises:
        BackendError: it is not, or the runtime does not show its kernels.
    """
    if not options.require_fused_attention or (engine and engine.all_fused):
        return
    given = engine.attention if engine else f"a build for {runtime.name}, which does not show its kernels"
    fix = "Export FP16 heads of 16 to 256 features, as many for queries as for values, or leave the option out."
    if not engine:
        fix = "Build with --target tensorrt, or leave the option out."
    expected = "every block fused, as --require-fused-attention asks"
    raise BackendError(f"{source.subject} attention", given=Literally(given), expected=expected, fix=fix)


def load_checked(runtime: Runtime, source: Source, built: Product | None) -> tuple[Runner, GoldenReport]:
    """Load a model and check its tensors and its golden outputs.

    Args:
        runtime: loads it.
        source: the model.
        built: the product of a build; None loads the ONNX file itself.

    Raises:
        FewheadsError: as :meth:`Runtime.load`, or a check fails. Nothing stays loaded.
    """
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
