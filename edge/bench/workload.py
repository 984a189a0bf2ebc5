"""Random sequence of requests that follows a plan's mixes of models, policies, priorities and deadlines."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from edge.bench.inputs import golden_inputs, text_inputs
from edge.bench.plan import LoadPlan
from edge.bundles.bundle import Bundle
from edge.bundles.programs import LoopProgram
from edge.client.inference import InferRequest, encode
from edge.errors import Raw, UsageError
from edge.programs.program import AUTO
from edge.scheduling.tier_selection import POLICIES

#: Limit of messages kept for each bundle, whatever its golden set holds.
_MAX_MESSAGES = 1024
#: Number of requests to draw at a time.
_BLOCK = 4096


class Kind(NamedTuple):
    """Everything but the inputs of a request; an empty text or 0 leaves a value to the server.

    Attributes:
        policy: the requested policy or tier.
        priority: 1 to 10.
        deadline_ms: from when the request is due; 0 for none.
        max_loops: budget of a looped model.
        tolerance: of a looped model.
        tiered: whether the model has several tiers, so that its responses name one.
        loops: name of the output with the loops of each row; empty if the model is not looped.
    """

    model: str
    policy: str
    priority: int
    deadline_ms: float
    max_loops: int
    tolerance: float
    tiered: bool
    loops: str

    @property
    def limits(self) -> str:
        """The requested limits of a loop, for people; empty without any."""
        limits = {"max_loops": self.max_loops, "tolerance": self.tolerance}
        return ", ".join(f"{name} {value:g}" for name, value in limits.items() if value)


class Workload:
    """Endless sequence of requests, equal for equal seeds.

    Args:
        bundles: models, and the parts of the requests that each gets.
        plan: rows, texts, mixes and seed.
    """

    def __init__(self, bundles: Mapping[Bundle, float], plan: LoadPlan) -> None:
        looped = any(isinstance(bundle.manifest.program, LoopProgram) for bundle in bundles)
        if (plan.max_loops or plan.tolerances) and not looped:
            option, given = "--max-loops" if plan.max_loops else "--tolerance", Raw("bundles without a loop")
            raise UsageError(option, given=given, expected="a looped model among the bundles", fix="Leave it out.")
        self._requests: list[tuple[Kind, list[bytes], bytes]] = []
        numbers = (plan.priorities, plan.deadlines_ms, plan.max_loops, plan.tolerances)
        mixes = [(plan.policies or {"": 1.0}).items(), *((mix or {0.0: 1.0}).items() for mix in numbers)]
        parts = []
        for bundle, part in bundles.items():
            manifest, bodies = bundle.manifest, _bodies(bundle, plan)
            known = [*POLICIES, *(tier.name for tier in manifest.tiers), AUTO]
            if wrong := [policy for policy in plan.policies if policy not in known]:
                expected, fix = f"one of {', '.join(known)}", "Leave it out for the server's."
                raise UsageError(f"--policy for {manifest.name}", given=wrong[0], expected=expected, fix=fix)
            loops = manifest.program.loops if isinstance(manifest.program, LoopProgram) else ""
            for combination in product(*mixes):
                (policy, priority, deadline_ms, *limits), shares = zip(*combination, strict=True)
                max_loops, tolerance = limits if loops else (0, 0.0)
                tiered = len(manifest.tiers) > 1
                kind = Kind(manifest.name, policy, int(priority), deadline_ms, int(max_loops), tolerance, tiered, loops)
                self._requests.append((kind, bodies, _tail(kind)))
                parts.append(part * prod(shares))
        self._parts = np.array(parts) / sum(parts)
        self._generator = np.random.default_rng([plan.seed, 1])  # another sequence than the arrivals'
        self._drawn: list[tuple[int, float]] = []

    def draw(self) -> tuple[Kind, bytes]:
        """Return the next request: its kind and its message."""
        if not self._drawn:
            numbers = self._generator.choice(len(self._parts), _BLOCK, p=self._parts).tolist()
            self._drawn = list(zip(numbers, self._generator.random(_BLOCK).tolist(), strict=True))
        number, position = self._drawn.pop()
        kind, bodies, tail = self._requests[number]
        return kind, bodies[int(position * len(bodies))] + tail  # concatenated messages merge


def timeout_tail(seconds: float) -> bytes:
    """Return bytes that add the parameter ``timeout`` to a request's message when appended."""
    return encode(InferRequest("", {}, timeout_seconds=max(seconds, 1e-6)), in_stream=True).SerializeToString()


def _tail(kind: Kind) -> bytes:
    policy = kind.policy if kind.policy in POLICIES else ""
    request = InferRequest(
        kind.model,
        {},
        priority=kind.priority,
        policy=policy,
        tier="" if policy else kind.policy,
        max_loops=kind.max_loops or None,
        tolerance=kind.tolerance or None,
    )
    return encode(request).SerializeToString()


def _bodies(bundle: Bundle, plan: LoadPlan) -> list[bytes]:
    manifest = bundle.manifest
    if plan.texts:
        names = [spec.name for spec in manifest.preprocess.inputs] if manifest.preprocess else []
        inputs = text_inputs(manifest.name, names, plan.rows, plan.texts)
    else:
        inputs = golden_inputs(bundle, plan.rows)[:_MAX_MESSAGES]
    version = str(manifest.version)
    return [encode(InferRequest(manifest.name, tensors, version=version)).SerializeToString() for tensors in inputs]
