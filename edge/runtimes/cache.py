"""The cache of builds: one directory for each combination of model, runtime and machine."""

from __future__ import annotations

import logging
import os
import platform
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge.bundles.golden import GoldenReport
from edge.bundles.manifest_file import encode
from edge.errors import BundleError
from edge.files import read_recorded, read_regular, sha256, write_durably
from edge.runtimes.runtime import EngineReport, Runtime, Source

log = logging.getLogger(__name__)

FORMAT_VERSION = 2
RECORD_NAME = "build.json"
_MAX_RECORD_BYTES = 256 * 1024


class BuildRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``build.json`` beside a built file.

    Attributes:
        name: the bundle's name.
        version: the bundle's version.
        tier: the tier's name.
        onnx_sha256: of the bundle's ONNX file that it was built from.
        runtime: the name of the runtime that it was built for.
        runtime_version: its version.
        device: the runtime's device.
        reason: why this runtime was chosen.
        machine: the processor architecture.
        fewheads_version: the release that built it.
        file: the file to load, beside this record.
        sha256: of that file.
        size_bytes: of that file.
        seconds: how long the build took, checks included.
        golden: how the file did on the golden set; None where it could not run.
        golden_skipped: why it could not.
        engine: the compiler's report; None for a runtime without one.
    """

    name: str
    version: int
    tier: str
    onnx_sha256: str
    runtime: str
    runtime_version: str
    device: str
    reason: str
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
    """A checked build: its directory, its record, and the bytes of its file."""

    directory: Path
    record: BuildRecord
    data: bytes


def cache_directory(given: Path | None) -> Path:
    """Return the cache to use: the given one, else ``$FEWHEADS_CACHE``, else ``~/.cache/fewheads``."""
    return given or Path(os.environ.get("FEWHEADS_CACHE") or Path.home() / ".cache" / "fewheads")


def entry(given: Path | None, source: Source, runtime: Runtime) -> Path:
    """Return the directory of a build.

    Its name covers all that makes the build unusable, or its record untrue, elsewhere.

    Args:
        given: the cache, as :func:`cache_directory` takes it.
        source: what is built.
        runtime: what it is built for.

    Raises:
        BackendError: the runtime is not installed.
    """
    # The manifest holds the profile that an engine is built for, and the hash of the golden set that it passed.
    model = (sha256(encode(source.bundle.manifest)), source.tier.name, source.artifact.role, source.onnx_sha256)
    parts = (*model, *runtime.cache_key(), platform.machine(), str(FORMAT_VERSION))
    return cache_directory(given) / sha256("\n".join(parts).encode())[:16]


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
