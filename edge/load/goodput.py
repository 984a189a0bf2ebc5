"""Goodput under overload: responses within the deadline, by tier policy."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from edge.bench.open_loop import capacity
from edge.bench.plan import CONSTANT, Plan, due_times, limited
from edge.bench.sender import EXPIRED, IN_TIME, LATE, REFUSED, Columns, Sender, run
from edge.bench.timing import Percentiles
from edge.bench.workload import Workload
from edge.bundles.bundle import Bundle
from edge.errors import Raw, ServerError, UsageError
from edge.launch import running_server

#: The default deadline, as a multiple of a request's latency on an idle server, and its minimum.
_DEADLINE_FACTOR, _LEAST_DEADLINE_MS = 20.0, 50.0
#: Pause between bursts, in which the server recovers.
_PAUSE_SECONDS = 1.0


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """Outcomes of all requests of one policy.

    Attributes:
        in_time: responses within the deadline, as the client saw it.
        refused: rejected at once, with RESOURCE_EXHAUSTED.
        late: the rest, on which the server wasted its work.
        per_second: responses in time for each second of the bursts.
        p50_ms: latency of the responses in time; 0 without any.
        tiers: responses in time by tier.
        lag_p99_ms: delay of the client; near the deadline, the client is the bottleneck.
    """

    policy: str
    sent: int
    in_time: int
    refused: int
    late: int
    per_second: float
    p50_ms: float
    p99_ms: float
    tiers: dict[str, int]
    lag_p99_ms: float


class GoodputReport(msgspec.Struct, frozen=True):
    """Comparison of policies on one server.

    Attributes:
        capacity_per_second: responses of the full tier to eight clients in a closed loop.
        offered_per_second: rate of requests in the bursts.
        seconds: length of all bursts of a policy together.
    """

    model: str
    capacity_per_second: float
    offered_per_second: float
    deadline_ms: float
    seconds: float
    bursts: tuple[Burst, ...]


def goodput(
    path: Path,
    *,
    policies: Sequence[str],
    factor: float,
    seconds: float,
    rounds: int,
    deadline_ms: float | None,
    target: str = "auto",
    cache: Path | None = None,
    advanced: Callable[[], None] = lambda: None,
) -> GoodputReport:
    """Start a server, and send it bursts of golden inputs beyond its capacity, by each policy in turn.

    Args:
        factor: load, as a multiple of the full tier's capacity.
        seconds: length of each burst.
        rounds: bursts of each policy, in turns, so that other load on the machine affects all policies alike.
        deadline_ms: of each request; None is 20 times the latency of one, at least 50.
        advanced: called after each burst.
    """
    bundle = Bundle.open(path)
    if len(bundle.manifest.tiers) < 2:
        given = Raw(f"{bundle.manifest.name} with one tier")
        fix = "Export several runs into one bundle with `fewheads export --name`."
        raise UsageError("BUNDLE", given=given, expected="one with several tiers", fix=fix)
    plan = Plan(patience_seconds=60.0)
    with running_server([path], target=target, cache=cache) as ready:
        url = f"127.0.0.1:{ready.grpc_port}"
        idle = capacity(url, {bundle: 1.0}, plan, seconds)
        deadline = deadline_ms or max(_DEADLINE_FACTOR * idle.alone_ms, _LEAST_DEADLINE_MS)
        rate = factor * idle.per_second
        senders = []
        for policy in policies:
            own = msgspec.structs.replace(plan, policies={policy: 1.0}, deadlines_ms={deadline: 1.0})
            senders.append(Sender(url, Workload({bundle: 1.0}, own), own))
        for _ in range(rounds):
            for sender in senders:
                _burst(url, sender, rate, seconds)
                time.sleep(_PAUSE_SECONDS)
                advanced()
    total = seconds * rounds
    bursts = tuple(_summary(policy, one.record.columns(), total) for policy, one in zip(policies, senders, strict=True))
    return GoodputReport(bundle.manifest.name, idle.per_second, rate, deadline, total, bursts)


def _burst(url: str, sender: Sender, rate: float, seconds: float) -> None:
    async def send() -> None:
        async with sender:
            await sender.open_loop(limited(due_times(CONSTANT, rate), seconds))

    run(send, sender.interrupt)
    if sender.interrupted:
        raise KeyboardInterrupt
    columns = sender.record.columns()
    other = columns.where(~np.isin(columns.outcome, (IN_TIME, LATE, REFUSED, EXPIRED)))
    if len(other):
        given = Raw(f"{other.outcome[0]}, {other.cause[0]}")
        expected = "an answer, a refusal or a missed deadline"
        raise ServerError(f"server at {url}", given=given, expected=expected, fix="Look into the server's log.")


def _summary(policy: str, columns: Columns, seconds: float) -> Burst:
    good = columns.where(columns.outcome == IN_TIME)
    latency, refused = Percentiles.of(good.latency), columns.counts().get(REFUSED, 0)
    return Burst(
        policy=policy,
        sent=len(columns),
        in_time=len(good),
        refused=refused,
        late=len(columns) - len(good) - refused,
        per_second=len(good) / seconds,
        p50_ms=latency.p50_ms,
        p99_ms=latency.p99_ms,
        tiers=dict(Counter(good.tier.tolist())),
        lag_p99_ms=Percentiles.of(columns.lag).p99_ms,
    )
