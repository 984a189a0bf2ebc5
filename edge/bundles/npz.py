"""Uncompressed ``.npz`` files with the arrays of a bundle."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping

import numpy as np

from edge.datatypes import Array
from edge.errors import BundleError, Raw

_FIX = "Export the bundle again."


def encode_npz(arrays: Mapping[str, Array]) -> bytes:
    """Return a file whose bytes depend on nothing but the arrays.

    Those of ``np.savez`` differ around its members, and so the hash, between versions of Python.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.save(member, array, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), member.getvalue())
    return buffer.getvalue()


def decode_npz(data: bytes, subject: str) -> dict[str, Array]:
    """Return the arrays of a file; raise a BundleError about ``subject`` if it is malformed or compressed."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            # A stored member cannot be larger than the file, so nothing small can unpack to something huge.
            packed = [item.filename for item in archive.infolist() if item.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise BundleError(f"{subject} member {packed[0]!r}", given="compressed", expected="stored", fix=_FIX)
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}
    except BundleError:
        raise
    except Exception as error:  # broken bytes make zipfile and NumPy raise more kinds than either documents
        raise BundleError(subject, given=Raw(error), expected="an .npz without pickles", fix=_FIX) from None
