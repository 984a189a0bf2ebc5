"""Runs of the compared models, whose names say how to put scores or gates on the transformer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from export.finetune.models import MODEL, OpenedModel, head_of, open_model
from export.models.heads import Head, SequenceClassifier, SpanClassifier
from export.papers.adaptive.mechanisms import MECHANISMS

_PREFIX = "adaptive-"


def name_of(mechanism: str) -> str:
    """Return the name of a mechanism's models in runs."""
    return f"{_PREFIX}{mechanism}" if MECHANISMS[mechanism].modules else MODEL


def open_compared(directory: Path) -> OpenedModel:
    """Read a run of ``fewheads compare``, or any that :func:`export.finetune.models.open_model` reads.

    The matrices are the smaller ones where the scores are the same for all inputs.
    """
    scored = [name for name, mechanism in MECHANISMS.items() if mechanism.modules]
    found = open_model(directory, {name_of(name): partial(_new, name) for name in scored})
    if found.config is None or not found.config.model.startswith(_PREFIX):
        return found
    shrink = MECHANISMS[found.config.model.removeprefix(_PREFIX)].shrink
    assert found.head is not None
    return replace(found, head=shrink(found.head)) if shrink else found


def _new(mechanism: str, **arguments: Any) -> Head:
    head, modules = head_of(**arguments), MECHANISMS[mechanism].modules
    assert modules is not None
    if not isinstance(head, SequenceClassifier | SpanClassifier):
        raise TypeError("no classifier of texts")  # export.training.checkpoint expects this of wrong arguments
    return modules(head)
