"""The cache of builds: one directory for each combination of model, runtime and machine."""

from __future__ import annotations

import logging
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge.bundles.golden import GoldenReport
from edge.bundles.manifest_file import encode
from edge.errors import BundleError, Literally, UsageError
from edge.files import read_recorded, read_regular, remove_abandoned, sha256, write_durably
from edge.runtimes.runtime import EngineReport, Product, Runtime, Source

log = logging.getLogger(__name__)

FORMAT_VERSION = 4
RECORD_NAME = "build.json"
_MAX_RECORD_BYTES = 256 * 1024
_NAME_DIGITS = 16
#: Records that are looked at to explain why none fits.
_MOST_RECORDS = 1024


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
        key: everything that the build depends on, as :func:`key_of` returns it.
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
    key: dict[str, str]
    golden: GoldenReport | None = None
    golden_skipped: str | None = None
    engine: EngineReport | None = None


class Cached(NamedTuple):
    """A checked build: its directory, its record, and the bytes of its file."""

    directory: Path
    record: BuildRecord
    data: bytes

    @property
    def product(self) -> Product:
        """The build as :meth:`Runtime.build` returned it."""
        return Product(self.record.file, self.data, self.record.engine)


def cache_directory(given: Path | None) -> Path:
    """Return the cache to use: the given one, else ``$FEWHEADS_CACHE``, else ``~/.cache/fewheads``."""
    return given or Path(os.environ.get("FEWHEADS_CACHE") or Path.home() / ".cache" / "fewheads")


def key_of(source: Source, runtime: Runtime) -> dict[str, str]:
    """Return everything that makes a build unusable, or its record untrue, elsewhere, by its name.

    Raises:
        BackendError: the runtime is not installed.
    """
    return {
        # It holds the profile that an engine is built for, and the hash of the golden set that it passed.
        "manifest": sha256(encode(source.bundle.manifest)),
        "tier": source.tier.name,
        "role": source.artifact.role,
        "onnx": source.onnx_sha256,
        "precision": source.artifact.precision,
        **runtime.build_key(source),
        **runtime.cache_key(),
        "processor": platform.machine(),
        "format": str(FORMAT_VERSION),
    }


def entry(given: Path | None, key: Mapping[str, str]) -> Path:
    """Return the directory of a build.

    Args:
        given: the cache, as :func:`cache_directory` takes it.
        key: what the build depends on.
    """
    text = "\n".join(f"{name}={value}" for name, value in sorted(key.items()))
    return cache_directory(given) / sha256(text.encode())[:_NAME_DIGITS]


def find(directory: Path, key: Mapping[str, str]) -> Cached | None:
    """Return the build in ``directory``, or None. A broken one, or one for another key, is logged and not used.

    Args:
        directory: as :func:`entry` returns it.
        key: what the build has to depend on.
    """
    if not directory.exists():
        return None
    try:
        record = _record(directory)
        if differing := differences(record.key, key):
            raise ValueError(f"it was built for {differing[0]}, and this is {differing[1]}")
        # The record must not lead out of the directory.
        if Path(record.file).name != record.file:
            raise ValueError("its file is elsewhere")
        return Cached(directory, record, read_recorded(directory / record.file, record.size_bytes, record.sha256))
    except (BundleError, msgspec.DecodeError, ValueError, RecursionError) as error:
        log.warning("the build in %s is ignored, build it again: %s", directory, error)
        return None


def has(directory: Path) -> bool:
    """Return whether there is a build in ``directory``, which need not be a good one."""
    return (directory / RECORD_NAME).is_file()


def nearest(given: Path | None, key: Mapping[str, str]) -> tuple[str, str] | None:
    """Return how the build of the same file and runtime that is nearest to a key differs from it.

    Args:
        given: the cache, as :func:`cache_directory` takes it.
        key: of a build that the cache has not.

    Returns:
        What the build was made for and what is asked of it, such as ``version 10.3.0`` and ``version 10.16.2``; None
        where there is no such build.
    """
    same = ("onnx", "runtime", "tier", "role")
    found = [one for one in _keys(cache_directory(given)) if all(one.get(name) == key[name] for name in same)]
    if not found:
        return None
    return differences(min(found, key=lambda one: len(_differing(one, key))), key)


def differences(found: Mapping[str, str], expected: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the parts of two keys that differ, each side as text; None for equal keys."""
    names = _differing(found, expected)
    if not names:
        return None
    return _text(found, names), _text(expected, names)


def check_writable(given: Path | None) -> None:
    """Check that builds can be kept.

    Raises:
        UsageError: the cache is read-only, or cannot be made.
    """
    directory = cache_directory(given)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise unwritable(directory, error) from None


def unwritable(directory: Path, error: OSError) -> UsageError:
    """Return the error of a cache that cannot be written."""
    fix = "Give another directory with --cache or FEWHEADS_CACHE, or make room in this one."
    return UsageError(
        "--cache", given=Literally(error), expected=f"a cache at {directory} that can be written", fix=fix
    )


def clean(given: Path | None) -> None:
    """Remove what builds that were killed have left."""
    remove_abandoned(cache_directory(given), f"[0-9a-f]{{{_NAME_DIGITS}}}")


def timing_cache(given: Path | None, runtime: Runtime) -> Path:
    """Return the file of kernel times that builds for the same runtime, version and device share."""
    text = "\n".join(f"{name}={value}" for name, value in sorted(runtime.cache_key().items()))
    return cache_directory(given) / "timing" / f"{sha256(text.encode())[:_NAME_DIGITS]}.bin"


def write(directory: Path, record: BuildRecord, data: bytes) -> None:
    """Write a build into an empty directory.

    Raises:
        OSError: the disk refuses.
    """
    write_durably(directory / record.file, data)
    write_durably(directory / RECORD_NAME, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


def _record(directory: Path) -> BuildRecord:
    return msgspec.json.decode(read_regular(directory / RECORD_NAME, _MAX_RECORD_BYTES), type=BuildRecord)


def _keys(directory: Path) -> Iterator[dict[str, str]]:
    for path in sorted(directory.glob(f"*/{RECORD_NAME}"))[:_MOST_RECORDS]:
        with suppress(BundleError, msgspec.DecodeError, RecursionError):  # of an earlier release, or broken
            yield _record(path.parent).key


def _differing(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {*expected, *found} if found.get(name) != expected.get(name))


def _text(key: Mapping[str, str], names: list[str]) -> str:
    return ", ".join(f"{name} {key.get(name, 'unknown')}" for name in names)
