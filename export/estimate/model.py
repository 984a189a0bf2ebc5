"""One tier of a bundle: the work in its ONNX file for TensorRT, and the kernels of its engine.

TensorRT-RTX's builder lists the kernels in its log where the verbosity of profiling is detailed, without a GPU. The
engine is for a desktop GPU of the Orin's generation: TensorRT on the board may fuse a few layers differently.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from edge.bundles.bundle import Bundle
from edge.bundles.fields import Role
from edge.bundles.manifest import Profile, Tier
from edge.errors import BackendError
from edge.runtimes.tensorrt import package as tensorrt_package
from export.estimate.devices import Mode
from export.estimate.operations import ModelWork
from export.estimate.roofline import Prediction, predict

RUNTIME = "tensorrt"
#: Ampere, as the Orin's GPU; TensorRT-RTX does not compile for its SM87.
COMPUTE_CAPABILITY = "SM86"
_LAYER = re.compile(r"^Name: (.+?), LayerType: (\w+)", re.MULTILINE)
#: Layers of an engine without a kernel: they compute shapes on the host, or order streams.
_NO_KERNELS = frozenset({"shape_call", "constant", "signal", "wait"})
#: Sizes and offsets for shapes that are known only at run time, on the host; an engine of fixed shapes has none.
_HOST = re.compile(r"^(cast_hvar\^|__mye\d+_myl\d+_\d+$)")


def kernels(model: bytes, profile: Mapping[str, Profile]) -> list[str] | None:
    """Return the names of the kernels that one run of a model launches, in their order.

    Args:
        profile: input to its shapes, for every input with a dynamic dimension.

    Returns:
        None where TensorRT-RTX is not installed, cannot compile the model, or lists no layers.
    """
    try:
        trt = tensorrt_package.import_tensorrt("tensorrt_rtx")
    except BackendError:
        return None
    logger = tensorrt_package.logger_of("tensorrt_rtx")
    with _messages() as messages:
        builder = trt.Builder(logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        if not trt.OnnxParser(network, logger).parse(model):
            return None
        config = builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, COMPUTE_CAPABILITY), 0)
        if profile:
            shapes = builder.create_optimization_profile()
            for name, allowed in profile.items():
                shapes.set_shape(name, allowed.min, allowed.opt, allowed.max)
            config.add_optimization_profile(shapes)
        if builder.build_serialized_network(network, config) is None:
            return None
    return parse_layers("\n".join(messages)) or None


def parse_layers(log: str) -> list[str]:
    """Return the names of the kernels in a builder's log."""
    layers = [(name, kind) for name, kind in _LAYER.findall(log) if kind not in _NO_KERNELS]
    return [name for name, kind in layers if kind not in ("reshape", "cast") or not _HOST.match(name)]


@contextmanager
def _messages() -> Iterator[list[str]]:
    log = logging.getLogger(tensorrt_package.__name__)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    try:
        yield messages
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


class TierModel:
    """A tier's file of a role, with the kernels of its engine where they can be counted."""

    def __init__(self, bundle: Bundle, tier: Tier, role: Role = "model") -> None:
        self.artifact = artifact = bundle.artifact(RUNTIME, tier.name, role)
        data = bundle.read(artifact.file)
        self._work = ModelWork(data, f"model {bundle.path / artifact.file}")
        names = kernels(data, bundle.manifest.tensors(artifact).profile)
        self.launches = len(names) if names else None

    def predict(self, shapes: Mapping[str, tuple[int, ...]], mode: Mode) -> Prediction:
        """Predict a run for inputs of these shapes."""
        return predict(self._work.at(shapes), self.launches, mode)


def how_counted(counted: bool) -> str:
    """Return how kernels were counted, for people."""
    board = "TensorRT on the board may fuse differently: 10.3 lists 7.4 for a layer of ViT-B/16, TensorRT-RTX ten"
    if not counted:
        return f"counted in the graph: TensorRT-RTX is not installed or does not compile the model. {board}"
    try:
        release = tensorrt_package.version("tensorrt_rtx")
    except BackendError:
        release = "unknown"
    return f"counted in the engine of TensorRT-RTX {release} for {COMPUTE_CAPABILITY}. {board}"
