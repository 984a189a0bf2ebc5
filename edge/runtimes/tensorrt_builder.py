"""ONNX to TensorRT engine.

TensorRT-RTX compiles on any x86-64 machine, without a GPU. TensorRT itself builds only on the device that will run the
engine; ``flavor`` is all that differs here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from edge.bundles.manifest import Profile
from edge.bundles.onnx_file import check_self_contained
from edge.errors import BackendError, Literally
from edge.runtimes.build_memory import MORE_MEMORY
from edge.runtimes.runtime import BuildMemory, BuildOptions, EngineReport, Progress
from edge.runtimes.tensorrt_attention import attention_blocks, describe, unexplained
from edge.runtimes.tensorrt_indices import index_limits
from edge.runtimes.tensorrt_log import BuilderLog
from edge.runtimes.tensorrt_package import Flavor, import_tensorrt, logger_of
from edge.runtimes.tensorrt_profiles import Profiles, buckets, described
from edge.runtimes.tensorrt_progress import interruptible, monitor
from edge.runtimes.tensorrt_timing import attach, keep

log = logging.getLogger(__name__)

FUSED_KERNEL = b"_gemm_mha_v2"
_MIB = 1024**2
#: Python, NumPy and TensorRT's libraries.
_PROCESS_BYTES = 150 * _MIB
#: The flags of a weakly typed build, beside FP32.
_PRECISION_FLAGS = {"fp32": (), "fp16": ("FP16",), "int8": ("FP16", "INT8")}


class CompiledEngine(msgspec.Struct, frozen=True):
    """A serialized engine and how it was built."""

    data: bytes
    report: EngineReport


def compute_capabilities() -> tuple[str, ...]:
    """Return the compute capabilities that TensorRT-RTX compiles for, such as ``SM86``.

    Raises:
        BackendError: it is not installed.
    """
    members = import_tensorrt("tensorrt_rtx").ComputeCapability.__members__
    return tuple(sorted((name for name in members if name.startswith("SM")), key=lambda name: int(name[2:])))


def memory_needed(model_bytes: int, workspace_bytes: int) -> BuildMemory:
    """Return the estimated peak memory of a build on the device.

    On an Orin the builder's kernel library takes 927 MiB of the process and 752 MiB of the device (TensorRT 10.3). Four
    copies of the weights exist at the peak: the file's, the network's, the engine's and the device's, of which the
    last two, like the workspace, are device memory.
    """
    device = 752 * _MIB + 2 * model_bytes + workspace_bytes
    return BuildMemory(927 * _MIB + _PROCESS_BYTES + 2 * model_bytes + device, device)


def compile_onnx(
    model: bytes,
    profile: Mapping[str, Profile],
    *,
    flavor: Flavor,
    compute_capability: str | None,
    subject: str,
    precision: str = "fp32",
    options: BuildOptions = BuildOptions(),  # noqa: B008 - it is frozen
    progress: Progress | None = None,
) -> CompiledEngine:
    """Build an engine, with a profile for each bucket of its sequence axis.

    The network is strongly typed: it computes in the datatypes of the ONNX file. Where such a build fails on
    TensorRT 10, a weakly typed one follows, in which TensorRT chooses among the datatypes of ``precision``.

    Args:
        model: the bytes of the ONNX file, weights included.
        profile: input to the shapes that it may take, for every input with a dynamic dimension.
        flavor: the package of TensorRT.
        compute_capability: the GPU to compile for, such as ``SM86``; None is the one in this machine.
        subject: the name of the model in errors.
        precision: of the file: ``fp32``, ``fp16`` or ``int8``.
        options: how to build.
        progress: called during the build.

    Raises:
        BundleError: the model is no ONNX, or keeps weights in other files.
        BackendError: TensorRT is not installed, cannot parse the model, or cannot build it.
    """
    check_self_contained(model, subject)
    return _Job(model, profile, flavor, compute_capability, subject, precision, options, progress).compile()


class _Job:
    """One build, in up to two attempts."""

    def __init__(
        self,
        model: bytes,
        profile: Mapping[str, Profile],
        flavor: Flavor,
        compute_capability: str | None,
        subject: str,
        precision: str,
        options: BuildOptions,
        progress: Progress | None,
    ) -> None:
        self.trt = import_tensorrt(flavor)
        self.logger = logger_of(flavor)
        self.model, self.profile, self.flavor, self.subject = model, profile, flavor, subject
        self.compute_capability, self.precision, self.options = compute_capability, precision, options
        self.progress = progress
        self.log = BuilderLog()
        self.started = time.perf_counter()

    def compile(self) -> CompiledEngine:
        """Build strongly typed, or weakly where that fails and this TensorRT can."""
        self.logger.messages.clear()
        self.logger.listener = self.log.hear
        try:
            try:
                return self._attempt("")
            except BackendError as error:
                # A build without memory fails again.
                if not hasattr(self.trt.BuilderFlag, "FP16") or self.log.out_of_memory:
                    raise
                reason = f"the strongly typed build failed: {error.given}"
                log.warning("%s is built weakly typed: %s", self.subject, reason)
                try:
                    return self._attempt(reason)
                except BackendError:
                    raise error from None
        finally:
            self.logger.listener = None

    def _attempt(self, weak: str) -> CompiledEngine:
        """Build once.

        Args:
            weak: why the network is weakly typed; empty for a strongly typed one.
        """
        trt = self.trt
        builder = trt.Builder(self.logger)
        strong = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = builder.create_network(0 if weak else strong)
        _parse(trt, self.model, network, self.logger, self.subject)
        # Taken before the build: it may change the network.
        layers, blocks = int(network.num_layers), attention_blocks(trt, network)
        limits = index_limits(trt, network)
        profiles = buckets(self.profile)
        config = _config(trt, builder, profiles, len(self.model), self.compute_capability, self.subject, self.options)
        for flag in _PRECISION_FLAGS[self.precision] if weak else ():
            config.set_flag(getattr(trt.BuilderFlag, flag))
        timing, timed = self.options.timing_cache, "off"
        if timing and self.compute_capability is None:  # a cache for another GPU would need that GPU
            timed = attach(config, timing)
        watcher = monitor(trt, self.progress or (lambda position: None))
        config.progress_monitor = watcher
        with interruptible(watcher):
            engine = builder.build_serialized_network(network, config)
        if engine is None:
            raise self._failed()
        if timed != "off" and timing:
            keep(config, timing)
        data = bytes(engine)
        # The name of every fused attention kernel holds this, in TensorRT 10 on an Orin and in TensorRT-RTX alike.
        fused = FUSED_KERNEL in data
        notes = [self.log.warning(), unexplained(blocks, fused), f"weakly typed: {weak}" if weak else ""]
        report = EngineReport(
            builder=self.flavor,
            version=str(trt.__version__),
            layers=layers,
            attention_blocks=len(blocks),
            attention_fused=fused if blocks else None,
            attention=describe(blocks, fused),
            seconds=time.perf_counter() - self.started,
            warnings=tuple(self.logger.messages),
            typing="weak" if weak else "strong",
            typing_reason=weak,
            profiles=tuple(described(one) for one in profiles),
            skipped_tactics=self.log.skipped_tactics,
            workspace_bytes=self.options.workspace_bytes,
            timing_cache=timed,
            index_limits=limits,
            notes=tuple(filter(None, notes)),
        )
        return CompiledEngine(data, report)

    def _failed(self) -> BackendError:
        given = Literally("; ".join(self.logger.messages) or "no reason from TensorRT")
        expected = f"a model that {self.flavor} {self.trt.__version__} builds"
        fix = "Serve it with --target onnxruntime, or export it with other operators."
        if self.log.out_of_memory:
            given = Literally(self.log.out_of_memory)
            expected = f"enough memory to build with a workspace of {self.options.workspace_bytes // _MIB} MiB"
            fix = f"{MORE_MEMORY}."
        return BackendError(self.subject, given=given, expected=expected, fix=fix)


def _parse(trt: Any, model: bytes, network: Any, logger: Any, subject: str) -> None:
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse(model)
    if parsed and network.num_outputs:
        return
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    found = [f"{e.desc()}{_where(e.node_name(), e.node_operator())}" for e in errors]
    raise BackendError(
        subject,
        given=Literally("; ".join(found) or "a graph without outputs"),
        expected=f"an ONNX model that {trt.__name__} {trt.__version__} parses",
        fix="Export it again with standard ONNX operators, or serve it with --target onnxruntime.",
    )


def _where(node: str, operator: str) -> str:
    return f" at node {node!r} ({operator})" if node or operator else ""


def _config(
    trt: Any,
    builder: Any,
    profiles: Sequence[Profiles],
    model_bytes: int,
    compute_capability: str | None,
    subject: str,
    options: BuildOptions,
) -> Any:
    config = builder.create_builder_config()
    # FP32 must stay FP32: with TF32's 10 bits of mantissa a model would miss its golden outputs.
    config.clear_flag(trt.BuilderFlag.TF32)
    pools = trt.MemoryPoolType
    config.set_memory_pool_limit(pools.WORKSPACE, options.workspace_bytes)
    # On a Jetson this pool counts all memory of the build, the builder's own included: below it no kernel is tried.
    # TensorRT takes only powers of two, and merely logs an error about others.
    needed = memory_needed(model_bytes, options.workspace_bytes).size_bytes
    config.set_memory_pool_limit(pools.TACTIC_DRAM, 1 << (needed - 1).bit_length())
    for profile in profiles:
        shapes = builder.create_optimization_profile()
        for name, allowed in profile.items():
            shapes.set_shape(name, allowed.min, allowed.opt, allowed.max)
        if config.add_optimization_profile(shapes) < 0:
            fix = "Export the bundle again."
            given = Literally(described(profile))
            raise BackendError(f"{subject} profile", given=given, expected="shapes of its inputs", fix=fix)
    if compute_capability is not None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, compute_capability), 0)
    return config
