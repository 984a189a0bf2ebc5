"""Random sequence of requests that follows a plan's mixes of models, policies, priorities and deadlines."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

import numpy as np

from edge.bundles.bundle import Bundle
from edge.client.inference import InferRequest, encode
from edge.errors import UsageError
from edge.load.inputs import golden_inputs, text_inputs
from edge.load.plan import Plan
from edge.pb import inference_pb2 as pb
from edge.programs.cascade import AUTO
from edge.scheduling.tier_selection import POLICIES

#: Limit of messages kept for each bundle, whatever its golden set holds.
_MAX_MESSAGES = 1024
#: Number of requests to draw at a time.
_BLOCK = 4096


class Kind(NamedTuple):
    """Everything but the inputs of a request.

    Attributes:
        policy: the requested policy or tier; empty leaves it to the server.
        priority: 1 to 10; 0 leaves it to the server.
        deadline_ms: from when the request is due; 0 for none.
        tiered: whether the model has several tiers, so that its responses name one.
    """

    model: str
    policy: str
    priority: int
    deadline_ms: float
    tiered: bool


class Workload:
    """Endless sequence of requests, equal for equal seeds.

    Args:
        bundles: models, and the parts of the requests that each gets.
        plan: rows, texts, mixes and seed.

    Attributes:
        kinds: all combinations of the mixes, as numbered by :meth:`draw`.
    """

    def __init__(self, bundles: Mapping[Bundle, float], plan: Plan) -> None:
        self.kinds: list[Kind] = []
        self._bodies: list[list[bytes]] = []
        self._tails: list[bytes] = []
        policies = (plan.policies or {"": 1.0}).items()
        priorities, deadlines_ms = (mix or {0.0: 1.0} for mix in (plan.priorities, plan.deadlines_ms))
        mixes = list(product(policies, priorities.items(), deadlines_ms.items()))
        parts = []
        for bundle, part in bundles.items():
            bodies, tiers = _bodies(bundle, plan), [tier.name for tier in bundle.manifest.tiers]
            _check_policies(plan, bundle.manifest.name, tiers)
            for (policy, one), (priority, two), (deadline_ms, three) in mixes:
                self.kinds.append(Kind(bundle.manifest.name, policy, int(priority), deadline_ms, len(tiers) > 1))
                self._bodies.append(bodies)
                self._tails.append(_tail(policy, int(priority)))
                parts.append(part * one * two * three)
        self._parts = np.array(parts) / sum(parts)
        self._generator = np.random.default_rng([plan.seed, 1])  # another sequence than the arrivals'
        self._drawn: list[tuple[int, int]] = []

    def draw(self) -> tuple[int, bytes]:
        """Return the next request: its index in :attr:`kinds`, and its message."""
        if not self._drawn:
            kinds = self._generator.choice(len(self.kinds), _BLOCK, p=self._parts).tolist()
            places = self._generator.random(_BLOCK).tolist()
            self._drawn = [
                (kind, int(place * len(self._bodies[kind]))) for kind, place in zip(kinds, places, strict=True)
            ]
        kind, place = self._drawn.pop()
        # Concatenated Protobuf messages merge.
        return kind, self._bodies[kind][place] + self._tails[kind]


def timeout_tail(seconds: float) -> bytes:
    """Return bytes that add the parameter ``timeout`` to a request's message when appended."""
    tail = pb.ModelInferRequest()
    tail.parameters["timeout"].int64_param = max(int(seconds * 1e6), 1)
    return tail.SerializeToString()


def _tail(policy: str, priority: int) -> bytes:
    tail = pb.ModelInferRequest()
    if policy:
        tail.parameters["policy" if policy in POLICIES else "tier"].string_param = policy
    if priority:
        tail.parameters["priority"].int64_param = priority
    return tail.SerializeToString()


def _check_policies(plan: Plan, model: str, tiers: list[str]) -> None:
    known = [*POLICIES, *tiers, AUTO]
    wrong = [policy for policy in plan.policies if policy not in known]
    if wrong:
        expected, fix = f"one of {', '.join(known)}", "Leave it out for the server's."
        raise UsageError(f"--policy for {model}", given=wrong[0], expected=expected, fix=fix)


def _bodies(bundle: Bundle, plan: Plan) -> list[bytes]:
    manifest = bundle.manifest
    if plan.texts:
        names = [spec.name for spec in manifest.preprocess.inputs] if manifest.preprocess else []
        inputs = text_inputs(manifest.name, names, plan.rows, plan.texts)
    else:
        inputs = golden_inputs(bundle, plan.rows)[:_MAX_MESSAGES]
    return [
        encode(InferRequest(manifest.name, each, version=str(manifest.version))).SerializeToString() for each in inputs
    ]
