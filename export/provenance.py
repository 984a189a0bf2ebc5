"""Origin of weights, as recorded in a run directory and its bundle."""

from __future__ import annotations

import subprocess
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from edge import __version__
from edge.bundles.manifest import Provenance

_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "numpy")


def provenance(*, trainer: str, data: str, seed: int | None) -> Provenance:
    """Return the provenance of weights that are made now; ``trainer`` and ``data`` are descriptions for people."""
    return Provenance(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        trainer=trainer,
        data=data,
        seed=seed,
        git_commit=_git_commit(),
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """Return the versions of the packages that train and convert models."""
    return {"fewheads": __version__, **{package: version(package) for package in _PACKAGES}}


def _git_commit() -> str | None:
    """Return the commit that this source is, with ``-dirty`` after it if it was changed; None outside a checkout."""
    # ls-files first: an installed copy may be inside of another checkout, whose commit is irrelevant.
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
