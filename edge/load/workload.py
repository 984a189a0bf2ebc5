"""Random sequence of requests that follows a plan's mixes of models, policies, priorities and deadlines."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

import numpy as np

from edge.bench.inputs import golden_inputs, text_inputs
from edge.bench.plan import Plan
from edge.bundles.bundle import Bundle
from edge.bundles.programs import LoopProgram
from edge.client.inference import InferRequest, encode
from edge.errors import Raw, UsageError
from edge.pb import inference_pb2 as pb
from edge.programs.program import AUTO
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
        max_loops: budget of a looped model; 0 leaves it to the server.
        tolerance: of a looped model; 0 leaves it to the server.
        loops: name of the output with the loops of each row; empty if the model is not looped.
    """

    model: str
    policy: str
    priority: int
    deadline_ms: float
    tiered: bool
    max_loops: int = 0
    tolerance: float = 0.0
    loops: str = ""

    @property
    def limits(self) -> str:
        """The requested limits of a loop, for people; empty without any."""
        given = {"max_loops": self.max_loops, "tolerance": self.tolerance}
        return ", ".join(f"{name} {value:g}" for name, value in given.items() if value)


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
        numbers = (plan.priorities, plan.deadlines_ms, plan.max_loops, plan.tolerances)
        priorities, deadlines_ms, max_loops, tolerances = ((mix or {0.0: 1.0}).items() for mix in numbers)
        mixes = list(product(policies, priorities, deadlines_ms, max_loops, tolerances))
        programs = [bundle.manifest.program for bundle in bundles]
        if (plan.max_loops or plan.tolerances) and not any(isinstance(one, LoopProgram) for one in programs):
            option = "--max-loops" if plan.max_loops else "--tolerance"
            given, fix = Raw("it without a looped model"), "Leave it out."
            raise UsageError(option, given=given, expected="a looped model among the bundles", fix=fix)
        parts = []
        for bundle, part in bundles.items():
            bodies, tiers = _bodies(bundle, plan), [tier.name for tier in bundle.manifest.tiers]
            _check_policies(plan, bundle.manifest.name, tiers)
            program = bundle.manifest.program
            loops = program.loops if isinstance(program, LoopProgram) else ""
            for (policy, one), (priority, two), (deadline_ms, three), (budget, four), (tolerance, five) in mixes:
                kind = Kind(bundle.manifest.name, policy, int(priority), deadline_ms, len(tiers) > 1)
                if loops:
                    kind = kind._replace(max_loops=int(budget), tolerance=tolerance, loops=loops)
                self.kinds.append(kind)
                self._bodies.append(bodies)
                self._tails.append(_tail(kind))
                parts.append(part * one * two * three * four * five)
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


def _tail(kind: Kind) -> bytes:
    tail = pb.ModelInferRequest()
    if kind.policy:
        tail.parameters["policy" if kind.policy in POLICIES else "tier"].string_param = kind.policy
    if kind.priority:
        tail.parameters["priority"].int64_param = kind.priority
    if kind.max_loops:
        tail.parameters["max_loops"].int64_param = kind.max_loops
    if kind.tolerance:
        tail.parameters["tolerance"].double_param = kind.tolerance
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
