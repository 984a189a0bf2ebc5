"""Memory check before a model is loaded: where memory runs out, the kernel kills a process, seldom the right one."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from edge.bundles import manifest_file
from edge.bundles.bundle import Bundle
from edge.bundles.manifest import Manifest, Profile
from edge.bundles.programs import GenerateProgram
from edge.datatypes import NUMPY_TYPES, TensorSpec
from edge.errors import LoadFailed, Raw
from edge.files import sha256
from edge.instruments.memory import MemorySampler
from edge.runtimes.runtime import Runtime
from edge.scheduling.admission import CacheBudget

_MIB = 1024**2
#: Resident bytes of ONNX Runtime for each byte of the model: 2.2 to 2.3 for MiniLM in FP32 and dynamic INT8, dense and
#: reduced, 2.2 for bare matrix products; it packs matrices a second time.
_RESIDENT_PER_BYTE = 2.3
#: Further bytes of one tier while it is loaded, for each byte of the model: the peak was 3.0 to 3.1.
_LOADING_PER_BYTE = 0.8
#: Assumed size of a BYTES element.
_TEXT_BYTES = 64


class MemoryBudget:
    """Rejects models that would not leave enough memory free. Thread-safe; it counts concurrent loads.

    The need of a model that was loaded before in this process is its growth then; otherwise it is estimated from the
    sizes of its files and tensors. The headroom must cover what runs need beyond their inputs and outputs. While a
    model that generates text is loaded or being loaded, what requests have not reserved of ``cache`` must stay free,
    too. Where the available memory cannot be read, no model is rejected.
    """

    def __init__(
        self, memory: MemorySampler, headroom_bytes: int, instances: int = 1, cache: CacheBudget | None = None
    ) -> None:
        self._memory, self._headroom_bytes, self._instances = memory, headroom_bytes, instances
        self._cache = cache
        self._generating = 0  # models
        self._lock = threading.Lock()
        self._reserved = 0
        self._known: dict[str, int] = {}

    @contextmanager
    def reserved(self, bundle: Bundle, runtime: Runtime) -> Iterator[None]:
        """Reserve the memory of a model while the block loads it; raise LoadFailed if too little would stay free."""
        known = self._known.get(_key(bundle))
        needed, generates = _estimate(bundle, runtime, self._instances, known), _generates(bundle.manifest)
        with self._lock:
            texts = self._cache if self._generating or generates else None
            self._check(bundle, needed, "as it took before" if known else "estimated from its files", texts)
            self._reserved += needed
            self._generating += generates
        try:
            yield
        except BaseException:
            self.closed(bundle.manifest)
            raise
        finally:
            with self._lock:
                self._reserved -= needed

    def closed(self, manifest: Manifest) -> None:
        """Record that a model is no longer loaded."""
        with self._lock:
            self._generating -= _generates(manifest)

    def learn(self, bundle: Bundle, grown_bytes: int) -> None:
        """Record how much the process grew while a model was loaded."""
        if grown_bytes:
            key = _key(bundle)
            # A later load grows less where it takes what an earlier one has left.
            self._known[key] = max(grown_bytes, self._known.get(key, 0))

    def _check(self, bundle: Bundle, needed: int, source: str, cache: CacheBudget | None) -> None:
        available, texts = self._memory.available(), cache.most_bytes - cache.reserved_bytes if cache else 0
        total = needed + texts + self._headroom_bytes
        if available is None or total <= available.size_bytes - self._reserved:
            return
        reasons = [f"{_mib(needed)} {source}"] + [f"{_mib(texts)} for keys and values"] * bool(cache)
        others = f", of which {_mib(self._reserved)} are for others that are being loaded" if self._reserved else ""
        headroom = f"{_mib(self._headroom_bytes)} to be kept free"
        lacking = LoadFailed(
            f"memory for {bundle.manifest.name}:{bundle.manifest.version}",
            given=Raw(f"{_mib(available.size_bytes)} available ({available.source}){others}"),
            expected=f"{_mib(total)}: {', '.join(reasons)}, and {headroom}",
            fix="Unload another model, serve fewer tiers or instances, or lower --memory-headroom-bytes"
            + (" or --cache-mib." if cache else "."),
        )
        lacking.lacks_memory = True
        raise lacking


def _key(bundle: Bundle) -> str:
    return sha256(manifest_file.encode(bundle.manifest))


def _generates(manifest: Manifest) -> bool:
    return isinstance(manifest.program, GenerateProgram)


def _estimate(bundle: Bundle, runtime: Runtime, instances: int, known: int | None) -> int:
    manifest = bundle.manifest
    artifacts = [runtime.artifact(bundle, tier.name, role) for tier in manifest.tiers for role in manifest.roles]
    files = [manifest.files[artifact.file].size_bytes for artifact in artifacts]
    tensors = sum(_largest(spec, manifest.profile.get(spec.name)) for spec in (*manifest.inputs, *manifest.outputs))
    resident = known if known is not None else sum(files) * _RESIDENT_PER_BYTE
    # Decoders have buffers of their own, for what the cache's limit admits.
    buffers = 0 if _generates(manifest) else len(files) * runtime.tensor_buffers
    return math.ceil(resident + max(files) * _LOADING_PER_BYTE + max(instances, buffers) * tensors)


def _largest(spec: TensorSpec, profile: Profile | None) -> int:
    shape = profile.max if profile else [abs(size) for size in spec.shape]
    width = _TEXT_BYTES if spec.datatype == "BYTES" else NUMPY_TYPES[spec.datatype].itemsize
    return math.prod(shape) * width


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.0f} MiB"
