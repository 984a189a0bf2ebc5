"""Kernels of an engine: what TensorRT-RTX's builder lists after it has fused the network, without a GPU.

The builder's log names the layers of the engine where the verbosity of profiling is detailed. An engine cannot be
inspected without a GPU, and it is one for a desktop GPU of the Orin's generation: TensorRT on the board may fuse a few
layers differently.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from edge.bundles.manifest import Profile
from edge.errors import BackendError
from edge.runtimes import tensorrt_package

#: Ampere, as the Orin's GPU; TensorRT-RTX does not compile for its SM87.
COMPUTE_CAPABILITY = "SM86"
_LAYER = re.compile(r"^Name: (.+?), LayerType: (\w+)", re.MULTILINE)
#: Layers of an engine that launch nothing: they compute shapes on the host, or order streams.
_NO_KERNELS = frozenset({"shape_call", "constant", "signal", "wait"})


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
    return [name for name, kind in _LAYER.findall(log) if kind not in _NO_KERNELS]


@contextmanager
def _messages() -> Iterator[list[str]]:
    """Collect all messages of TensorRT, and keep them out of the log of this program."""
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
