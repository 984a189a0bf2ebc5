"""Compiler from ONNX to TensorRT engines, and the timing cache that builds for the same device share.

TensorRT-RTX compiles on any x86-64 machine, without a GPU. TensorRT builds only on the device that runs the engine.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edge.bundles.onnx_file import check_self_contained
from edge.errors import BackendError, BundleError, Raw
from edge.files import read_regular, sha256, write_whole
from edge.runtimes.build_child import MORE_MEMORY
from edge.runtimes.runtime import BuildMemory, BuildOptions, BuildProgress, EngineReport, Product, Progress
from edge.runtimes.tensorrt.network import attention_blocks, describe, index_limits, unexplained
from edge.runtimes.tensorrt.package import BuilderLog, Flavor, import_tensorrt, logger_of
from edge.runtimes.tensorrt.profiles import Profiles, described, optimization_profiles

log = logging.getLogger(__name__)

FUSED_KERNEL = b"_gemm_mha_v2"
_MIB = 1024**2
#: Python, NumPy and TensorRT's libraries.
_PROCESS_BYTES = 150 * _MIB
_MAX_TIMING_BYTES = 256 * _MIB
_DIGEST = 64


def compute_capabilities() -> tuple[str, ...]:
    """Return the compute capabilities that TensorRT-RTX compiles for, such as ``SM86``."""
    members = import_tensorrt("tensorrt_rtx").ComputeCapability.__members__
    return tuple(sorted((name for name in members if name.startswith("SM")), key=lambda name: int(name[2:])))


def memory_needed(model_bytes: int, workspace_bytes: int) -> BuildMemory:
    """Return the estimated peak memory of a build on the device.

    On an Orin the builder's kernel library takes 927 MiB of the process and 752 MiB of the device (TensorRT 10.3). At
    the peak there are four copies of the weights: in the file, the network, the engine and the device. The last two
    and the workspace are device memory.
    """
    device = 752 * _MIB + 2 * model_bytes + workspace_bytes
    return BuildMemory(927 * _MIB + _PROCESS_BYTES + 2 * model_bytes + device, device)


def compile_onnx(
    model: bytes,
    profile: Profiles,
    *,
    more_profiles: Sequence[Profiles] = (),
    flavor: Flavor,
    compute_capability: str | None,
    subject: str,
    options: BuildOptions = BuildOptions(),  # noqa: B008 - it is frozen
    progress: Progress | None = None,
) -> Product:
    """Build an engine, with a profile for each bucket of its sequence axis or with the given profiles.

    The network is strongly typed: it computes in the datatypes of the ONNX file.

    Args:
        profile: the allowed shapes of every dynamic input.
        more_profiles: further sets of them; then none has buckets.
        compute_capability: the GPU to compile for, such as ``SM86``; None is this machine's.

    Raises:
        BundleError: the model is not ONNX, or its weights are in other files.
        BackendError: TensorRT is not installed, cannot parse the model, or cannot build it.
    """
    check_self_contained(model, subject)
    profiles = optimization_profiles(profile, more_profiles)
    compilation = _Compilation(model, profiles, flavor, compute_capability, subject, options, progress)
    compilation.logger.messages.clear()
    compilation.logger.listener = compilation.log.hear
    try:
        return compilation.run()
    finally:
        compilation.logger.listener = None


@dataclass
class _Compilation:
    model: bytes
    profiles: Sequence[Profiles]
    flavor: Flavor
    compute_capability: str | None
    subject: str
    options: BuildOptions
    progress: Progress | None

    def __post_init__(self) -> None:
        self.trt, self.logger, self.log = import_tensorrt(self.flavor), logger_of(self.flavor), BuilderLog()

    def run(self) -> Product:
        trt, began = self.trt, time.perf_counter()
        builder = trt.Builder(self.logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        self._parse(network)
        # Before the build, which may change the network.
        layers, blocks = int(network.num_layers), attention_blocks(trt, network)
        limits = index_limits(trt, network)
        config = self._config(builder)
        timing, timed = self.options.timing_cache, "off"
        if timing and self.compute_capability is None:  # only the GPU itself can fill its cache
            timed = _load_timing(config, timing)
        watcher = monitor(trt, self.progress or (lambda position: None))
        config.progress_monitor = watcher
        with interruptible(watcher):
            engine = builder.build_serialized_network(network, config)
        if engine is None:
            raise self._failed()
        if timed != "off" and timing:
            _save_timing(config, timing)
        data = bytes(engine)
        # The name of every fused attention kernel contains this, in TensorRT 10 on an Orin and in TensorRT-RTX.
        fused = FUSED_KERNEL in data
        report = EngineReport(
            builder=self.flavor,
            version=str(trt.__version__),
            layers=layers,
            attention_blocks=len(blocks),
            attention_fused=fused if blocks else None,
            attention=describe(blocks, fused),
            seconds=time.perf_counter() - began,
            warnings=tuple(self.logger.messages),
            profiles=tuple(map(described, self.profiles)),
            skipped_tactics=self.log.skipped_tactics,
            workspace_bytes=self.options.workspace_bytes,
            timing_cache=timed,
            index_limits=limits,
            notes=tuple(filter(None, (self.log.warning(), unexplained(blocks, fused)))),
        )
        return Product("model.engine", data, report)

    def _failed(self) -> BackendError:
        given = self.log.out_of_memory or "; ".join(self.logger.messages) or "no reason from TensorRT"
        expected = f"a model that {self.flavor} {self.trt.__version__} builds"
        fix = "Serve it with --target onnxruntime, or export it with other operators."
        if self.log.out_of_memory:
            expected = f"enough memory to build with a workspace of {self.options.workspace_bytes // _MIB} MiB"
            fix = f"{MORE_MEMORY}."
        return BackendError(self.subject, given=Raw(given), expected=expected, fix=fix)

    def _parse(self, network: Any) -> None:
        parser = self.trt.OnnxParser(network, self.logger)
        if parser.parse(self.model) and network.num_outputs:
            return
        reasons = []
        for error in map(parser.get_error, range(parser.num_errors)):
            node, operator = error.node_name(), error.node_operator()
            reasons.append(error.desc() + (f" at node {node!r} ({operator})" if node or operator else ""))
        given = Raw("; ".join(reasons) or "a graph without outputs")
        expected = f"an ONNX model that {self.flavor} {self.trt.__version__} parses"
        fix = "Export it again with standard ONNX operators, or serve it with --target onnxruntime."
        raise BackendError(self.subject, given=given, expected=expected, fix=fix)

    def _config(self, builder: Any) -> Any:
        trt, options = self.trt, self.options
        config = builder.create_builder_config()
        # With TF32's 10 bits of mantissa an FP32 model would miss its golden outputs.
        config.clear_flag(trt.BuilderFlag.TF32)
        pools = trt.MemoryPoolType
        config.set_memory_pool_limit(pools.WORKSPACE, options.workspace_bytes)
        # On a Jetson this pool limits all memory of the build, the builder's own included; above it, kernels are
        # skipped. TensorRT accepts only powers of two, and merely logs an error about others.
        needed = memory_needed(len(self.model), options.workspace_bytes).size_bytes
        config.set_memory_pool_limit(pools.TACTIC_DRAM, 1 << (needed - 1).bit_length())
        for profile in self.profiles:
            shapes = builder.create_optimization_profile()
            for name, allowed in profile.items():
                shapes.set_shape(name, allowed.min, allowed.opt, allowed.max)
            if config.add_optimization_profile(shapes) < 0:
                fix = "Export the bundle again."
                given = Raw(described(profile))
                raise BackendError(f"{self.subject} profile", given=given, expected="shapes of its inputs", fix=fix)
        if self.compute_capability is not None:
            config.num_compute_capabilities = 1
            config.set_compute_capability(getattr(trt.ComputeCapability, self.compute_capability), 0)
        return config


def monitor(trt: Any, progress: Progress) -> Any:
    """Return a progress monitor, which must outlive the build: TensorRT's nested phases as one fraction.

    A phase counts within the current step of its parent; phases of one parent that run at once share its step.
    TensorRT swallows exceptions of callbacks. So the monitor keeps the first one as ``error``, for the caller to raise,
    and cancels the build at its next step.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.error: BaseException | None = None
            self._phases: dict[str, tuple[str | None, int, int]] = {}  # name to parent, steps, and steps done
            self._fraction = 0.0

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self._phases[phase] = (parent, max(steps, 1), 0)
            self._report(phase)

        def step_complete(self, phase: str, step: int) -> bool:
            parent, steps, _ = self._phases[phase]
            self._phases[phase] = (parent, steps, step + 1)
            self._report(phase)
            return self.error is None

        def phase_finish(self, phase: str) -> None:
            parent, _, _ = self._phases.pop(phase)
            self._fraction = self._fraction if parent in self._phases else 1.0
            self._report(phase)

        def _report(self, phase: str) -> None:
            if self.error:  # TensorRT also finishes the phases of a cancelled build
                return
            roots = [name for name, (parent, _, _) in self._phases.items() if parent not in self._phases]
            self._fraction = max(self._fraction, *map(self._done, roots), 0.0)
            try:
                progress(BuildProgress(phase, self._fraction))
            except BaseException as error:
                self.error = error

        def _done(self, phase: str) -> float:
            _, steps, done = self._phases[phase]
            inside = sum(self._done(name) for name, (parent, _, _) in list(self._phases.items()) if parent == phase)
            return min((done + min(inside, 1.0)) / steps, 1.0)

    return Monitor()


@contextmanager
def interruptible(watcher: Any) -> Iterator[None]:
    """Let Ctrl-C cancel a build in this thread, and raise the ``error`` of ``watcher``, the monitor, after the build.

    Python would raise KeyboardInterrupt in the next callback of TensorRT, which swallows it.
    """

    def interrupt(number: int, frame: object) -> None:
        watcher.error = watcher.error or KeyboardInterrupt()

    # Only the main thread may set a handler, and a program's own handler stays.
    replaces = threading.current_thread() is threading.main_thread()
    replaces = replaces and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if replaces:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if replaces:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if watcher.error:
        raise watcher.error


def _load_timing(config: Any, path: Path) -> Literal["new", "reused"]:
    """Load the timing cache in a file into a builder's configuration, or an empty one if the file cannot be used."""
    if path.exists():
        try:
            content = read_regular(path, _MAX_TIMING_BYTES)
            digest, data = content[:_DIGEST], content[_DIGEST:]
            cache = config.create_timing_cache(data) if sha256(data).encode() == digest else None
            if cache is not None and config.set_timing_cache(cache, False):
                return "reused"
            log.info("the timing cache %s is broken or of another TensorRT or device, and is made anew", path)
        except BundleError as error:
            log.info("the timing cache is made anew: %s", error)
    config.set_timing_cache(config.create_timing_cache(b""), False)
    return "new"


def _save_timing(config: Any, path: Path) -> None:
    """Write the timing cache of a builder's configuration; an error of the disk is only logged."""
    cache = config.get_timing_cache()
    if cache is None:
        return
    data = bytes(cache.serialize())
    try:
        write_whole(path, sha256(data).encode() + data)
    except OSError as error:
        log.warning("the timing cache %s is not kept, so the next build takes as long: %s", path, error)
