"""Inputs to send to a model, golden inputs of its bundle or lines of text, and messages of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edge.bench.load_plan import LoadPlan
from edge.bundles.bundle import Bundle
from edge.bundles.programs import LoopProgram
from edge.client.inference import InferRequest, encode, text
from edge.datatypes import Array
from edge.errors import Raw, UsageError
from edge.programs.program import AUTO
from edge.scheduling.tier_selection import POLICIES

Inputs = dict[str, Array]

#: Limit of different requests to a model, which covers all lengths and bounds the memory.
_MAX_REQUESTS = 1024


def golden_inputs(bundle: Bundle, rows: int) -> list[Inputs]:
    """Return requests made of golden rows: text where the model takes text, tensors otherwise."""
    arrays = {
        name: array.astype(np.object_) if array.dtype.kind == "S" else array
        for name, array in (bundle.golden.raw or bundle.golden.inputs).items()
    }
    if not bundle.manifest.max_batch_size:
        if rows > 1:
            expected = f"1, since {bundle.manifest.name} has no batch"
            raise UsageError("--rows", given=rows, expected=expected, fix="Leave it out.")
        return [arrays]
    picks = [np.arange(start, start + rows) % bundle.golden.rows for start in range(bundle.golden.rows)]
    return [{name: array[pick] for name, array in arrays.items()} for pick in picks]


def text_inputs(model: str, names: Sequence[str], rows: int, texts: Sequence[str]) -> list[Inputs]:
    """Return requests of ``rows`` successive lines each, starting over after the last line.

    A tab separates the texts for the inputs ``names``.
    """
    lines = [line.split("\t") for line in texts]
    wrong = next((line for line in lines if len(line) != len(names)), None)
    if wrong is not None:
        given = Raw(f"a line of {len(wrong)}, {chr(9).join(wrong)[:40]!r}")
        expected = f"{len(names)}, separated by tabs" if names else f"none, since {model} takes no text"
        raise UsageError("--texts", given=given, expected=expected, fix="Leave it out for the golden inputs.")
    picks = [[lines[(start + row) % len(lines)] for row in range(rows)] for start in range(len(lines))]
    return [dict(zip(names, map(text, zip(*pick, strict=True)), strict=True)) for pick in picks[:_MAX_REQUESTS]]


def read_texts(path: Path) -> tuple[str, ...]:
    """Read the non-empty lines of a UTF-8 file, at least one."""
    try:
        lines = tuple(line for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
        given: object = Raw("no lines")
    except (OSError, UnicodeDecodeError) as error:
        lines, given = (), Raw(error)
    if not lines:
        fix = "Write one text for each request into a line."
        raise UsageError(f"{path}", given=given, expected="a file of texts", fix=fix)
    return lines


class ModelRequests(NamedTuple):
    """Messages for one model.

    Attributes:
        tiered: whether the model has several tiers, so that its responses name one.
        loops: name of the output with the loops of each row; empty if the model is not looped.
    """

    model: str
    tiered: bool
    loops: str
    messages: list[bytes]


def requests_of(bundle: Bundle, plan: LoadPlan) -> ModelRequests:
    """Return the messages of a plan for a bundle; raise a UsageError for a policy, text or limit that does not fit."""
    manifest = bundle.manifest
    known = [*POLICIES, *(tier.name for tier in manifest.tiers), AUTO]
    if plan.policy and plan.policy not in known:
        expected, fix = f"one of {', '.join(known)}", "Leave it out for the server's."
        raise UsageError(f"--policy for {manifest.name}", given=plan.policy, expected=expected, fix=fix)
    loops = manifest.program.loops if isinstance(manifest.program, LoopProgram) else ""
    limits = {"max_loops": plan.max_loops, "tolerance": plan.tolerance}
    for name, value in limits.items():
        if value is not None and not loops:
            option, given = f"--{name.replace('_', '-')}", Raw(f"{manifest.name}, which has no loop")
            raise UsageError(option, given=given, expected="looped models", fix="Leave it out.")
    if plan.texts:
        names = [spec.name for spec in manifest.preprocess.inputs] if manifest.preprocess else []
        inputs = text_inputs(manifest.name, names, plan.rows, plan.texts)
    else:
        inputs = golden_inputs(bundle, plan.rows)[:_MAX_REQUESTS]
    how = {"policy" if plan.policy in POLICIES else "tier": plan.policy}
    options: dict[str, Any] = {"version": str(manifest.version), "priority": plan.priority, **how, **limits}
    messages = [encode(InferRequest(manifest.name, tensors, **options)).SerializeToString() for tensors in inputs]
    return ModelRequests(manifest.name, len(manifest.tiers) > 1, loops, messages)


def drawn(models: Sequence[ModelRequests], seed: int) -> Iterator[tuple[ModelRequests, bytes]]:
    """Yield random requests, each with its message, equal for equal seeds; every model gets an equal part."""
    generator = random.Random(seed)
    while True:
        model = generator.choice(models)
        yield model, generator.choice(model.messages)
