"""From a bundle to what this machine runs: build it into the cache, and load it from there, checked every time."""

from __future__ import annotations

import logging
import platform
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from edge import __version__
from edge.bundles.bundle import Bundle
from edge.bundles.golden import GoldenReport, check_runner
from edge.bundles.manifest import Artifact
from edge.bundles.preprocess import preprocessor
from edge.datatypes import TensorSpec
from edge.errors import BundleError, Literally, UsageError
from edge.files import replaced_directory, reserve, sha256
from edge.runner import Runner
from edge.runtimes import cache, tensorrt_builder
from edge.runtimes.backends import Backend, choose
from edge.runtimes.cache import BuildRecord, Cached
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner, import_onnxruntime
from edge.runtimes.tensorrt_builder import EngineReport, Progress

log = logging.getLogger(__name__)

_EXPORT_AGAIN = "Export the bundle again; do not edit it by hand."


class Built(NamedTuple):
    """A build in the cache: where, its record, and whether it lay there already."""

    directory: Path
    record: BuildRecord
    reused: bool


@dataclass(frozen=True)
class Loaded:
    """A model that has reproduced its golden set.

    Attributes:
        runner: what computes it.
        golden_report: how it did.
        backend: what it runs on, and why.
        source: whether it was read from the cache or straight from the bundle.
    """

    runner: Runner
    golden_report: GoldenReport
    backend: Backend
    source: Literal["cache", "bundle"]


class _Product(NamedTuple):
    """The file of a build and what is known of it."""

    file: str
    data: bytes
    golden: GoldenReport | None = None
    golden_skipped: str | None = None
    engine: EngineReport | None = None


def build(
    bundle: Bundle,
    target: str = "auto",
    cache_dir: Path | None = None,
    *,
    tier: str | None = None,
    progress: Progress | None = None,
) -> Built:
    """Make what the device will run, check it, and put it into the cache; nothing is made twice.

    Args:
        bundle: the model.
        target: the backend, as :func:`edge.runtimes.backends.choose` takes it.
        cache_dir: the cache; None is the default one.
        tier: which size of the model; None is the full one.
        progress: is told how far a long build is.

    Raises:
        UsageError: there is no such target, or the cache cannot be written.
        BundleError: the bundle contradicts itself.
        BackendError: the runtime is missing, or cannot build the model.
        GoldenError: what was built does not reproduce the golden outputs. It is not kept.
    """
    backend = choose(target)
    artifact = _artifact(bundle, backend, tier)
    onnx_sha256 = bundle.manifest.files[artifact.file].sha256
    place = _place(bundle, backend, artifact, cache_dir)
    found = cache.find(place, onnx_sha256)
    if found:
        return Built(place, found.record, reused=True)
    started = time.perf_counter()
    try:
        # Opened before the work, so that a cache that cannot be written is known at once.
        with replaced_directory(place) as new:
            product = _make(bundle, backend, artifact, tier, progress)
            record = BuildRecord(
                name=bundle.manifest.name,
                version=bundle.manifest.version,
                tier=bundle.tier(tier).name,
                onnx_sha256=onnx_sha256,
                backend=backend,
                backend_version=_version(backend),
                machine=platform.machine(),
                fewheads_version=__version__,
                file=product.file,
                sha256=sha256(product.data),
                size_bytes=len(product.data),
                seconds=time.perf_counter() - started,
                golden=product.golden,
                golden_skipped=product.golden_skipped,
                engine=product.engine,
            )
            cache.write(new, record, product.data)
    except OSError as error:
        fix = "Give another directory with --cache or FEWHEADS_CACHE, or make room in this one."
        expected = f"a cache at {place.parent} that can be written"
        raise UsageError("--cache", given=Literally(error), expected=expected, fix=fix) from None
    return Built(place, record, reused=False)


def cached(bundle: Bundle, backend: Backend, cache_dir: Path | None = None, tier: str | None = None) -> Cached | None:
    """Return the build of a bundle for a backend, its hash checked, or None where there is none to be trusted."""
    artifact = _artifact(bundle, backend, tier)
    return cache.find(_place(bundle, backend, artifact, cache_dir), bundle.manifest.files[artifact.file].sha256)


def load_runner(
    bundle: Bundle, target: str = "auto", cache_dir: Path | None = None, *, tier: str | None = None
) -> Loaded:
    """Open the model that a server shall use: the build in the cache, or else the bundle's own ONNX file.

    Args:
        bundle: the model.
        target: the backend, as :func:`edge.runtimes.backends.choose` takes it.
        cache_dir: the cache; None is the default one.
        tier: which size of the model; None is the full one.

    Raises:
        UsageError: no such target, or one that this program only builds for.
        BundleError: the model is broken, or its tensors are not those of the manifest.
        BackendError: the runtime is missing.
        GoldenError: it does not reproduce the golden outputs.
    """
    backend = choose(target)
    if backend.name == "tensorrt-rtx":
        expected = "a target that this program can run"
        fix = "Its engines only prove that the model compiles; take auto to run it."
        raise UsageError("--target", given=target, expected=expected, fix=fix)
    artifact = _artifact(bundle, backend, tier)
    found = cached(bundle, backend, cache_dir, tier)
    model = found.data if found else bundle.read(artifact.file)
    runner = OnnxRuntimeRunner(model, subject=_subject(bundle, artifact), cuda=backend.device == "GPU")
    try:
        report = _verify(runner, bundle, artifact, tier)
    except BaseException:
        runner.close()
        raise
    source: Literal["cache", "bundle"] = "cache" if found else "bundle"
    log.info("%s %d was read from the %s. %s", bundle.manifest.name, bundle.manifest.version, source, backend.reason)
    return Loaded(runner, report, backend, source)


def _make(
    bundle: Bundle, backend: Backend, artifact: Artifact, tier: str | None, progress: Progress | None
) -> _Product:
    subject = _subject(bundle, artifact)
    model = bundle.read(artifact.file)
    if backend.name == "tensorrt-rtx":
        engine = tensorrt_builder.compile_onnx(
            model,
            bundle.manifest.profile,
            flavor="tensorrt_rtx",
            compute_capability=backend.device,
            subject=subject,
            progress=progress,
        )
        skipped = f"golden check not run: it needs a GPU of {backend.device}"
        return _Product("model.engine", engine.data, golden_skipped=skipped, engine=engine.report)
    preprocessor(bundle)  # what cannot be asked is not worth a build
    cuda = backend.device == "GPU"
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "model.onnx")
        # ONNX Runtime would call a full disk a broken model. Folded constants make a graph grow, seldom to its double.
        reserve(Path(scratch, "room"), 2 * len(model))
        OnnxRuntimeRunner(model, subject=subject, cuda=cuda, optimized_path=str(path)).close()
        optimized = path.read_bytes()
    # What was written is what will be loaded, so that is what has to pass.
    runner = OnnxRuntimeRunner(optimized, subject=subject, cuda=cuda)
    try:
        return _Product("model.onnx", optimized, golden=_verify(runner, bundle, artifact, tier))
    finally:
        runner.close()


def _verify(runner: Runner, bundle: Bundle, artifact: Artifact, tier: str | None) -> GoldenReport:
    subject = _subject(bundle, artifact)
    tensors = bundle.manifest.tensors(artifact)
    _check_tensors(f"{subject} inputs", runner.inputs, tensors.inputs)
    _check_tensors(f"{subject} outputs", runner.outputs, tensors.outputs)
    golden = bundle.goldens[bundle.tier(tier).name]
    return check_runner(runner, golden, artifact.tolerance, subject, bundle.manifest.max_batch_size)


def _check_tensors(subject: str, found: tuple[TensorSpec, ...], stated: tuple[TensorSpec, ...]) -> None:
    # By name: the order of a graph's tensors has no meaning.
    if {spec.name: spec for spec in found} != {spec.name: spec for spec in stated}:
        expected = f"{_listed(stated)}, as the manifest says"
        raise BundleError(subject, given=Literally(_listed(found)), expected=expected, fix=_EXPORT_AGAIN)


def _listed(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in specs)


def _artifact(bundle: Bundle, backend: Backend, tier: str | None) -> Artifact:
    return bundle.artifact("tensorrt" if backend.name == "tensorrt-rtx" else "onnxruntime", tier)


def _place(bundle: Bundle, backend: Backend, artifact: Artifact, cache_dir: Path | None) -> Path:
    onnx_sha256 = bundle.manifest.files[artifact.file].sha256
    return cache.entry(cache.cache_directory(cache_dir), bundle.manifest, onnx_sha256, backend, _version(backend))


def _subject(bundle: Bundle, artifact: Artifact) -> str:
    return f"model {bundle.path / artifact.file}"


def _version(backend: Backend) -> str:
    if backend.name == "tensorrt-rtx":
        return tensorrt_builder.version("tensorrt_rtx")
    return str(import_onnxruntime().__version__)
