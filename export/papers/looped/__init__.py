"""Looped transformers that learn function classes in context: paper 003, after Garg et al. 2022 (arXiv 2208.01066)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Models of ``fewheads train``, by the function class that they learn.
NAMES = ("looped-linear", "looped-sparse", "looped-tree", "looped-relu")
PREFIX = "looped-"
#: Name of the models in runs.
MODEL = "prompt-transformer"


def bundle_name(arguments: Mapping[str, Any]) -> str:
    """Return the name of a run's bundle from its recorded arguments, which may be wrong, as nothing has loaded it."""
    config = arguments.get("config")
    unlooped = isinstance(config, dict) and config.get("injection", "add") is None
    return f"{'unlooped-' if unlooped else PREFIX}{arguments.get('function')}"
