"""Settings of an experiment on disk: a directory never mixes results of different settings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import torch

from edge import __version__
from edge.errors import Raw, UsageError
from edge.files import sha256, write_whole
from export.training.provenance import processor

SETTINGS = "settings.json"


def keep_settings(directory: Path, settings: msgspec.Struct, *, unused: tuple[str, ...] = ()) -> None:
    """Write the settings of an experiment into its directory, or check those that are there.

    Args:
        unused: see :func:`check_settings`.

    Raises:
        UsageError: the experiment there has other or unknown settings, or the directory cannot be written.
    """
    if not check_settings(directory, settings, unused=unused):
        try:
            write_whole(directory / SETTINGS, msgspec.json.format(msgspec.json.encode(settings), indent=2))
        except OSError as error:
            expected, fix = "a directory to write", "Give another --out."
            given = Raw(error.strerror)
            raise UsageError(f"--out {directory}", given=given, expected=expected, fix=fix) from None


def check_settings(directory: Path, settings: msgspec.Struct, *, unused: tuple[str, ...] = ()) -> bool:
    """Return whether a directory has an experiment with these settings; False for an empty or missing one.

    Args:
        unused: how the names of settings begin that the results do not depend on; they may differ.

    Raises:
        UsageError: the experiment there has other or unknown settings.
    """
    path = directory / SETTINGS
    fix = "Give the earlier options on the same machine, or another --out."
    try:
        if not path.exists():
            if directory.is_dir() and any(directory.iterdir()):
                given, expected = Raw("results without settings"), f"{SETTINGS} beside them"
                raise UsageError(f"--out {directory}", given=given, expected=expected, fix="Give another --out.")
            return False
        found = dict(_flat(msgspec.json.decode(path.read_bytes())))
    except (OSError, msgspec.DecodeError, AttributeError) as error:
        raise UsageError(f"{path}", given=Raw(error), expected="settings of an experiment", fix=fix) from None
    wanted = dict(_flat(msgspec.json.decode(msgspec.json.encode(settings))))
    names = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
    names = [name for name in names if not name.startswith(unused)]
    if names:
        given = Raw(_listed(found, names))
        raise UsageError(f"--out {directory}", given=given, expected=_listed(wanted, names), fix=fix)
    return True


def machine() -> dict[str, str]:
    """Return the processor and the versions of packages, on which times and rounding depend."""
    here = processor()
    return {
        "cpu": here.name,
        "features": here.described,
        "cores": str(os.cpu_count()),
        "fewheads": __version__,
        "torch": str(torch.__version__),
        "onnxruntime": onnxruntime.__version__,
        "numpy": np.__version__,
    }


def digest(directory: Path, *patterns: str) -> str:
    """Return one SHA-256 of the files of a directory that match a pattern, names included."""
    files = sorted({path for pattern in patterns for path in directory.glob(pattern)})
    return sha256("\n".join(f"{path.name} {sha256(path.read_bytes())}" for path in files).encode())


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _listed(values: Mapping[str, Any], names: list[str]) -> str:
    # The first digits of a hash are enough.
    return ", ".join(f"{name} {str(values.get(name))[:40]}" for name in names)
