"""The timing cache of TensorRT's builder: measured kernel times that builds for the same device share."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

from edge.errors import BundleError
from edge.files import read_regular, sha256, write_whole

log = logging.getLogger(__name__)

_MAX_BYTES = 256 * 1024**2
_DIGEST = 64


def attach(config: Any, path: Path) -> Literal["new", "reused"]:
    """Give a builder's configuration the cache in a file, or an empty one where the file cannot be used.

    TensorRT refuses a cache of another version or device; a broken file never reaches it.
    """
    data = _read(path)
    if data:
        cache = config.create_timing_cache(data)
        if cache is not None and config.set_timing_cache(cache, False):
            return "reused"
        log.info("the timing cache %s does not fit this TensorRT and device, and is made anew", path)
    config.set_timing_cache(config.create_timing_cache(b""), False)
    return "new"


def keep(config: Any, path: Path) -> None:
    """Write the cache of a builder's configuration back; a disk that refuses is logged."""
    cache = config.get_timing_cache()
    if cache is None:
        return
    data = bytes(cache.serialize())
    try:
        write_whole(path, sha256(data).encode() + data)
    except OSError as error:
        log.warning("the timing cache %s is not kept, so the next build takes as long: %s", path, error)


def _read(path: Path) -> bytes:
    """Return the contents of a file that :func:`keep` wrote; nothing where there is none or it is broken."""
    if not path.exists():
        return b""
    try:
        content = read_regular(path, _MAX_BYTES)
    except BundleError as error:
        log.info("the timing cache is made anew: %s", error)
        return b""
    digest, data = content[:_DIGEST], content[_DIGEST:]
    if sha256(data).encode() != digest:
        log.info("the timing cache %s is broken, and is made anew", path)
        return b""
    return data
