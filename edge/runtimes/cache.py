"""The cache of built models: one directory for each combination of model, runtime and machine."""

from __future__ import annotations

import logging
import os
import platform
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge.bundles.golden import GoldenReport
from edge.bundles.manifest import Manifest
from edge.bundles.manifest_file import encode
from edge.errors import BundleError
from edge.files import read_recorded, read_regular, sha256, write_durably
from edge.runtimes.backends import Backend
from edge.runtimes.tensorrt_builder import EngineReport

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
RECORD_NAME = "build.json"
_MAX_RECORD_BYTES = 256 * 1024


class BuildRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was built: the ``build.json`` beside it.

    Attributes:
        name: the bundle's name.
        version: the bundle's version.
        tier: the tier's name.
        onnx_sha256: of the bundle's ONNX file that it was built from.
        backend: what it was built for, and why.
        backend_version: the version of that runtime.
        machine: the processor architecture.
        fewheads_version: the release that built it.
        file: the file to load, beside this record.
        sha256: of that file.
        size_bytes: of that file.
        seconds: how long the build took, checks included.
        golden: how the file did on the golden set; None where it could not run.
        golden_skipped: why it could not.
        engine: what TensorRT told; None for ONNX Runtime.
    """

    name: str
    version: int
    tier: str
    onnx_sha256: str
    backend: Backend
    backend_version: str
    machine: str
    fewheads_version: str
    file: str
    sha256: str
    size_bytes: int
    seconds: float
    golden: GoldenReport | None = None
    golden_skipped: str | None = None
    engine: EngineReport | None = None


class Cached(NamedTuple):
    """A build that was found and checked: where, its record, and the bytes of its file."""

    directory: Path
    record: BuildRecord
    data: bytes


def cache_directory(given: Path | None) -> Path:
    """Return the cache to use: the given one, else ``$FEWHEADS_CACHE``, else ``~/.cache/fewheads``."""
    return given or Path(os.environ.get("FEWHEADS_CACHE") or Path.home() / ".cache" / "fewheads")


def entry(cache: Path, manifest: Manifest, onnx_sha256: str, backend: Backend, backend_version: str) -> Path:
    """Return where a build lies. Its name holds all that makes a build unusable, or its record untrue, elsewhere."""
    # The manifest holds the profile that an engine is built for, and the hash of the golden set that it passed.
    model = (sha256(encode(manifest)), onnx_sha256)
    parts = (*model, backend.name, backend_version, backend.device, platform.machine(), str(FORMAT_VERSION))
    return cache / sha256("\n".join(parts).encode())[:16]


def find(directory: Path, onnx_sha256: str) -> Cached | None:
    """Return the build in ``directory``, or None. One that is broken is logged and not used."""
    if not directory.exists():
        return None
    try:
        record = msgspec.json.decode(read_regular(directory / RECORD_NAME, _MAX_RECORD_BYTES), type=BuildRecord)
        # The name holds 64 bits of a hash; the record has all of it, and must not lead out of the directory.
        if record.onnx_sha256 != onnx_sha256 or Path(record.file).name != record.file:
            raise ValueError("it was built from another model")
        return Cached(directory, record, read_recorded(directory / record.file, record.size_bytes, record.sha256))
    except (BundleError, msgspec.DecodeError, ValueError, RecursionError) as error:
        log.warning("the build in %s is ignored, build it again: %s", directory, error)
        return None


def write(directory: Path, record: BuildRecord, data: bytes) -> None:
    """Write a build into an empty directory.

    Raises:
        OSError: the disk refuses.
    """
    write_durably(directory / record.file, data)
    write_durably(directory / RECORD_NAME, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
