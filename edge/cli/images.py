"""Images and labels on the command line of ``fewheads infer``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge.datatypes import Array
from edge.errors import Raw, ServerRefused, UsageError
from edge.protocol import PROBABILITIES

if TYPE_CHECKING:
    from edge.client import Client

_STDIN = "-"
_IMAGE = "image"
#: A path with one of these is meant as a file, even if there is none.
_ENDINGS = (".jpg", ".jpeg", ".png")


def are_images(client: Client, model: str, version: str, arguments: Sequence[str]) -> bool:
    """Return whether arguments are files for a model that takes images; the server is asked if one may be a file."""
    if not any(one == _STDIN or one.lower().endswith(_ENDINGS) or os.path.isfile(one) for one in arguments):
        return False
    return takes_images(client, model, version)


def takes_images(client: Client, model: str, version: str) -> bool:
    """Return whether a model takes images, as its server says; False if the server does not know."""
    try:
        return client.preprocess(model, version) == _IMAGE
    except ServerRefused as error:
        if error.code == "UNIMPLEMENTED":  # another server
            return False
        raise


def read_images(paths: Sequence[str]) -> Array:
    """Return the contents of files, BYTES [files, 1]; ``-`` is stdin. Raise a UsageError if one cannot be read."""
    images = np.empty((len(paths), 1), np.object_)
    try:
        images[:, 0] = [sys.stdin.buffer.read() if path == _STDIN else Path(path).read_bytes() for path in paths]
    except OSError as error:
        fix = "Give paths of JPEG or PNG files, or - for stdin."
        raise UsageError("image", given=Raw(error), expected="a file", fix=fix) from None
    return images


def top_options(model: str, outputs: Sequence[str], top: int | None) -> dict[str, Any]:
    """Return the options of a request for so many labels; raise a UsageError if the model has none."""
    if top is None:
        return {}
    if PROBABILITIES not in outputs:
        given = Raw(f"{model} with the outputs {', '.join(outputs)}")
        fix = "Leave it out; where each word has a label, that is shown with its probability."
        raise UsageError("--top", given=given, expected="a model with one label for each input", fix=fix)
    return {"outputs": (PROBABILITIES,), "top": top}


def labels_of(ranked: Array) -> list[list[dict[str, Any]]]:
    """Return label and probability of each row's likeliest classes, from texts VALUE:INDEX:LABEL.

    Args:
        ranked: [rows, classes], or [classes] of a model without a batch.
    """
    rows = []
    for row in np.atleast_2d(ranked).tolist():
        parts = [text.decode(errors="backslashreplace").split(":", 2) for text in row]
        rows.append([{"label": part[-1], "probability": float(part[0])} for part in parts])
    return rows
