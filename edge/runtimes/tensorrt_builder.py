"""ONNX to TensorRT engine.

TensorRT-RTX compiles on any x86-64 machine, without a GPU. TensorRT itself builds only on the device that will run the
engine; ``flavor`` is all that differs here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from edge.bundles.manifest import Profile
from edge.bundles.onnx_file import check_self_contained
from edge.errors import BackendError, Literally
from edge.runtimes.runtime import EngineReport, Progress
from edge.runtimes.tensorrt_attention import Attention, attention_blocks, describe
from edge.runtimes.tensorrt_package import Flavor, import_tensorrt, logger_of


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


def compile_onnx(
    model: bytes,
    profile: Mapping[str, Profile],
    *,
    flavor: Flavor,
    compute_capability: str | None,
    subject: str,
    progress: Progress | None = None,
) -> CompiledEngine:
    """Build an engine. The network is strongly typed: it computes in the datatypes of the ONNX file.

    Args:
        model: the bytes of the ONNX file, weights included.
        profile: input to the shapes that it may take, for every input with a dynamic dimension.
        flavor: the package of TensorRT.
        compute_capability: the GPU to compile for, such as ``SM86``; None is the one in this machine.
        subject: the name of the model in errors.
        progress: called during the build.

    Raises:
        BundleError: the model is no ONNX, or keeps weights in other files.
        BackendError: TensorRT is not installed, cannot parse the model, or cannot build it.
    """
    check_self_contained(model, subject)
    trt = import_tensorrt(flavor)
    logger = logger_of(flavor)
    logger.messages.clear()
    started = time.perf_counter()
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    _parse(trt, model, network, logger, subject)
    # Taken before the build: it may change the network.
    layers, blocks = int(network.num_layers), attention_blocks(trt, network)
    config = _config(trt, builder, profile, compute_capability, subject)
    if progress:
        monitor = _monitor(trt, progress)
        config.progress_monitor = monitor
    # No timing cache: TensorRT-RTX would want a GPU to make one.
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise BackendError(
            subject,
            given=Literally("; ".join(logger.messages) or "no reason from TensorRT"),
            expected=f"a model that {flavor} {trt.__version__} builds",
            fix="Serve it with --target onnxruntime, or export it with other operators.",
        )
    data = bytes(engine)
    return CompiledEngine(data, _report(trt, flavor, layers, blocks, data, time.perf_counter() - started, logger))


def _report(
    trt: Any, flavor: Flavor, layers: int, blocks: list[Attention], data: bytes, seconds: float, logger: Any
) -> EngineReport:
    # The name of every fused attention kernel holds this, in TensorRT 10 on an Orin and in TensorRT-RTX alike.
    fused = b"_gemm_mha_v2" in data
    return EngineReport(
        builder=flavor,
        version=str(trt.__version__),
        layers=layers,
        attention_blocks=len(blocks),
        attention_fused=fused if blocks else None,
        attention=describe(blocks, fused),
        seconds=seconds,
        warnings=tuple(logger.messages),
    )


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
    trt: Any, builder: Any, profile: Mapping[str, Profile], compute_capability: str | None, subject: str
) -> Any:
    config = builder.create_builder_config()
    # FP32 must stay FP32: with TF32's 10 bits of mantissa a model would miss its golden outputs.
    config.clear_flag(trt.BuilderFlag.TF32)
    if profile:
        shapes = builder.create_optimization_profile()
        for name, allowed in profile.items():
            shapes.set_shape(name, allowed.min, allowed.opt, allowed.max)
        if config.add_optimization_profile(shapes) < 0:
            given = {name: (allowed.min, allowed.opt, allowed.max) for name, allowed in profile.items()}
            fix = "Export the bundle again."
            raise BackendError(f"{subject} profile", given=given, expected="shapes of its inputs", fix=fix)
    if compute_capability is not None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, compute_capability), 0)
    return config


def _monitor(trt: Any, progress: Progress) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.steps: dict[str, int] = {}

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.steps[phase] = steps
            progress(phase, 0, steps)

        def step_complete(self, phase: str, step: int) -> bool:
            progress(phase, step + 1, self.steps[phase])
            return True

        def phase_finish(self, phase: str) -> None:
            self.steps.pop(phase, None)

    return Monitor()
