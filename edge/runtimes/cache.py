"""The cache of builds: one directory for each combination of model, runtime and machine."""

from __future__ import annotations

import logging
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from glob import glob
from pathlib import Path

import msgspec

from edge.bundles.golden import GoldenReport
from edge.bundles.manifest_file import encode
from edge.errors import BundleError, Raw, UsageError
from edge.files import check_size, read_recorded, read_regular, remove_abandoned, sha256, write_durably
from edge.runtimes.runtime import EngineReport, Product, Runtime, Source

log = logging.getLogger(__name__)

FORMAT_VERSION = 4
RECORD_NAME = "build.json"
_MAX_RECORD_BYTES = 256 * 1024
_NAME_DIGITS = 16
#: The number of records that are read to explain why none matches.
_MOST_RECORDS = 1024


class BuildRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``build.json`` beside a built file."""

    name: str  # of the bundle, as is the version
    version: int
    tier: str
    onnx_sha256: str
    runtime: str
    runtime_version: str
    device: str
    reason: str  # why the runtime was chosen
    machine: str  # the processor architecture
    fewheads_version: str
    file: str  # the file to load, beside this record
    sha256: str  # of that file, as is the size
    size_bytes: int
    seconds: float  # checks included
    key: dict[str, str]  # everything that the build depends on; see key_of
    golden: GoldenReport | None = None  # None if the file cannot run here
    golden_skipped: str | None = None  # why it cannot
    engine: EngineReport | None = None


def cache_directory(given: Path | None) -> Path:
    """Return the cache to use: the given one, else ``$FEWHEADS_CACHE``, else ``~/.cache/fewheads``."""
    home = os.path.expanduser("~")  # unchanged for a user without a home
    default = Path(home if os.path.isabs(home) else "/", ".cache", "fewheads")
    return given or Path(os.environ.get("FEWHEADS_CACHE") or default)


def key_of(source: Source, runtime: Runtime) -> dict[str, str]:
    """Return everything that makes a build unusable, or its record false, if it differs."""
    return {
        # The manifest has the profile of the engine, and the hash of its golden set.
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
    """Return the directory of the build with a key."""
    return cache_directory(given) / _name(key)


def find(directory: Path, key: Mapping[str, str], *, record_only: bool = False) -> tuple[BuildRecord, Product] | None:
    """Return the build in a directory, or None. A broken one, or one with another key, is logged and not used.

    With ``record_only``, only the size of the build's file is checked, and its bytes are left out.
    """
    if not os.path.exists(directory):  # false, too, where this user may not look
        return None
    try:
        record = _record(directory)
        if differing := _differences(record.key, key):
            raise ValueError(f"it was built for {differing[0]}, and this is {differing[1]}")
        # The record must not lead out of the directory.
        if Path(record.file).name != record.file:
            raise ValueError("its file is elsewhere")
        path, data = directory / record.file, b""
        if record_only:
            check_size(path, record.size_bytes)
        else:
            data = read_recorded(path, record.size_bytes, record.sha256)
        return record, Product(record.file, data, record.engine)
    except (BundleError, OSError, msgspec.DecodeError, ValueError, RecursionError) as error:
        log.warning("the build in %s is ignored, build it again: %s", directory, error)
        return None


def nearest(given: Path | None, key: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the differences between the most similar build of the same file and runtime and a key; None without one.

    Both sides are text, the build's first, such as ``version 10.3.0`` and ``version 10.16.2``.
    """
    same = ("onnx", "runtime", "tier", "role")
    keys = [built for built in _keys(cache_directory(given)) if all(built.get(name) == key[name] for name in same)]
    return _differences(min(keys, key=lambda built: len(built.items() ^ key.items())), key) if keys else None


def check_writable(given: Path | None) -> None:
    """Raise a UsageError if the cache is read-only, or cannot be created."""
    directory = cache_directory(given)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise unwritable(directory, error) from None


def unwritable(directory: Path, error: OSError) -> UsageError:
    """Return the error of a cache that cannot be written."""
    expected = f"a cache at {directory} that can be written"
    fix = "Give another directory with --cache or FEWHEADS_CACHE, or make room in this one."
    return UsageError("--cache", given=Raw(error), expected=expected, fix=fix)


def clean(given: Path | None) -> None:
    """Remove the remains of killed builds."""
    remove_abandoned(cache_directory(given), f"[0-9a-f]{{{_NAME_DIGITS}}}")


def timing_cache(given: Path | None, runtime: Runtime) -> Path:
    """Return the file of kernel times that builds for the same runtime, version and device share."""
    return cache_directory(given) / "timing" / f"{_name(runtime.cache_key())}.bin"


def write(directory: Path, record: BuildRecord, data: bytes) -> None:
    """Write a build into an empty directory."""
    write_durably(directory / record.file, data)
    write_durably(directory / RECORD_NAME, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


def _name(key: Mapping[str, str]) -> str:
    text = "\n".join(f"{name}={value}" for name, value in sorted(key.items()))
    return sha256(text.encode())[:_NAME_DIGITS]


def _record(directory: Path) -> BuildRecord:
    return msgspec.json.decode(read_regular(directory / RECORD_NAME, _MAX_RECORD_BYTES), type=BuildRecord)


def _keys(directory: Path) -> Iterator[dict[str, str]]:
    # Unlike Path.glob, this finds nothing where this user may not look.
    for path in map(Path, sorted(glob(f"*/{RECORD_NAME}", root_dir=directory))[:_MOST_RECORDS]):
        with suppress(BundleError, OSError, msgspec.DecodeError, RecursionError):  # of an earlier release, or broken
            yield _record(directory / path.parent).key


def _differences(built: Mapping[str, str], expected: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the differing parts of two keys, each side as text; None for equal keys."""
    names = sorted({name for name, _ in built.items() ^ expected.items()})
    there, here = (", ".join(f"{name} {key.get(name, 'unknown')}" for name in names) for key in (built, expected))
    return (there, here) if names else None
