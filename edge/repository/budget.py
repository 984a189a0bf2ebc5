"""Memory check before a model is loaded: its estimated need against the available memory.

On a Jetson the processor and the GPU share the memory. When it runs out, the kernel kills a process, and seldom the
right one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from edge.bundles import manifest_file
from edge.bundles.bundle import Bundle
from edge.bundles.manifest import Profile
from edge.datatypes import NUMPY_TYPES, TensorSpec
from edge.errors import Literally, LoadFailed
from edge.files import sha256
from edge.instruments.memory import MemorySampler
from edge.runtimes.runtime import Runtime

_MIB = 1024**2
#: Resident bytes of ONNX Runtime for each byte of the model: 2.2 to 2.3 for MiniLM in FP32 and dynamic INT8, dense and
#: reduced, 2.2 for bare matrix products; it packs matrices a second time.
_RESIDENT_PER_BYTE = 2.3
#: What one tier needs beyond that while it is loaded, per byte: at the peak it was 3.0 to 3.1.
_LOADING_PER_BYTE = 0.8
#: Of a BYTES element nothing is known.
_TEXT_BYTES = 64


class MemoryBudget:
    """Refuses models that would not leave enough memory free. Thread-safe; loads at the same time know of each other.

    What the model took the last time in this process is believed; what it never took is estimated from the sizes of its
    files. What its runs take beyond their inputs and outputs is not known, and has to fit into the headroom.

    Args:
        memory: where it is read what there is; where nothing can be read, nothing is refused.
        headroom_bytes: what has to stay free.
        instances: how many runs of a model are computed at once.
    """

    def __init__(self, memory: MemorySampler, headroom_bytes: int, instances: int = 1) -> None:
        self._memory = memory
        self._headroom_bytes = headroom_bytes
        self._instances = instances
        self._lock = threading.Lock()
        self._reserved = 0
        self._known: dict[str, int] = {}

    @contextmanager
    def reserved(self, bundle: Bundle, runtime: Runtime) -> Iterator[None]:
        """Keep the memory of a model from others while the block loads it.

        Args:
            bundle: the model.
            runtime: loads its files.

        Raises:
            LoadFailed: too little would stay free. The message gives all numbers.
        """
        known = self._known.get(_key(bundle))
        needed = _estimate(bundle, runtime, self._instances, known)
        with self._lock:
            self._check(bundle, needed, "as it took before" if known else "as its files let expect")
            self._reserved += needed
        try:
            yield
        finally:
            with self._lock:
                self._reserved -= needed

    def learn(self, bundle: Bundle, grown_bytes: int) -> None:
        """Note how much the process grew while a model was loaded."""
        if grown_bytes:
            key = _key(bundle)
            # A later load grows less where it takes what an earlier one has left.
            self._known[key] = max(grown_bytes, self._known.get(key, 0))

    def _check(self, bundle: Bundle, needed: int, whence: str) -> None:
        available = self._memory.available()
        if available is None or needed + self._headroom_bytes <= available.size_bytes - self._reserved:
            return
        others = f", of which {_mib(self._reserved)} are for others that are being loaded" if self._reserved else ""
        headroom = f"{_mib(self._headroom_bytes)} to be kept free"
        raise LoadFailed(
            f"memory for {bundle.manifest.name}:{bundle.manifest.version}",
            given=Literally(f"{_mib(available.size_bytes)} available ({available.source}){others}"),
            expected=f"{_mib(needed + self._headroom_bytes)}: {_mib(needed)} {whence}, and {headroom}",
            fix="Unload another model, serve fewer tiers or instances, or lower --memory-headroom-bytes.",
        )


def _key(bundle: Bundle) -> str:
    return sha256(manifest_file.encode(bundle.manifest))


def _estimate(bundle: Bundle, runtime: Runtime, instances: int, known: int | None) -> int:
    """Return the bytes that loading a model takes at the peak.

    Args:
        bundle: the model.
        runtime: loads its files.
        instances: how many runs of it are computed at once.
        known: by how much the process grew for it, if it has done so before.
    """
    manifest = bundle.manifest
    files = [manifest.files[runtime.artifact(bundle, tier.name).file].size_bytes for tier in manifest.tiers]
    tensors = sum(_largest(spec, manifest.profile.get(spec.name)) for spec in (*manifest.inputs, *manifest.outputs))
    resident = known if known is not None else sum(files) * _RESIDENT_PER_BYTE
    return math.ceil(resident + max(files) * _LOADING_PER_BYTE + instances * tensors)


def _largest(spec: TensorSpec, profile: Profile | None) -> int:
    shape = profile.max if profile else [abs(size) for size in spec.shape]
    width = _TEXT_BYTES if spec.datatype == "BYTES" else NUMPY_TYPES[spec.datatype].itemsize
    return math.prod(shape) * width


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.0f} MiB"
