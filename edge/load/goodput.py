"""Goodput under overload: answers within the deadline, by policy.

Requests come at fixed times, whether the answers keep up or not: clients that wait for answers would send less as
soon as the server is slow, and hide the overload.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from edge.bundles.bundle import Bundle
from edge.errors import Literally, ServerError, UsageError
from edge.launch import running_server
from edge.load.arrivals import CONSTANT, Arrivals, limited
from edge.load.measure import Plan, capacity
from edge.load.record import EXPIRED, IN_TIME, LATE, REFUSED, Columns, Record
from edge.load.report import Percentiles
from edge.load.sender import Sender, run
from edge.load.workload import Shares, Workload

#: A deadline is so many times what a request takes that finds the server idle, and this at least.
_DEADLINE_FACTOR, _LEAST_DEADLINE_MS = 20.0, 50.0
#: Between bursts, so that each finds a server that has recovered.
_PAUSE_SECONDS = 1.0


class Burst(msgspec.Struct, frozen=True):
    """What came of the requests of one policy.

    Attributes:
        policy: that they asked for.
        sent: requests.
        in_time: answered within the deadline, as the client saw it.
        refused: at once, with RESOURCE_EXHAUSTED.
        late: the rest; their work was for nothing.
        per_second: answers in time for each second of the bursts.
        p50_ms: of the answers in time; 0 without any.
        p99_ms: of the answers in time.
        tiers: answers in time by tier.
        lag_p99_ms: by how much the client itself sent late; near the deadline, it is the client that was measured.
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
    """One comparison of policies on one server.

    Attributes:
        model: its name.
        capacity_per_second: what the full tier answers when eight clients ask as fast as they can.
        offered_per_second: what came in the bursts.
        deadline_ms: of each request.
        seconds: of all bursts of a policy together.
        bursts: by policy.
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
    arguments: Sequence[str] = (),
    advanced: Callable[[], None] = lambda: None,
) -> GoodputReport:
    """Send bursts beyond a bundle's capacity, by each policy in turn, to one server that is started for it.

    Args:
        path: the bundle; its golden inputs are the requests.
        policies: what the requests ask for; see :mod:`edge.scheduling.tier_selection`.
        factor: offered load, as a multiple of the full tier's capacity.
        seconds: of each burst.
        rounds: bursts of each policy, in turns, so that a noisy neighbour disturbs all alike.
        deadline_ms: of each request; None is 20 times what one takes, and 50 at least.
        target: the runtime.
        cache: directory of built models.
        arguments: more arguments of ``fewheads serve``.
        advanced: called after each burst.

    Raises:
        UsageError: the model has one tier, so no policy has a choice.
        FewheadsError: the bundle is broken, or the server does something else than answer, refuse or be late.
    """
    bundle = Bundle.open(path)
    if len(bundle.manifest.tiers) < 2:
        given = Literally(f"{bundle.manifest.name} with one tier")
        fix = "Export several runs into one bundle with `fewheads export --name`."
        raise UsageError("BUNDLE", given=given, expected="one with several tiers", fix=fix)
    plan = Plan(rate=None, patience_seconds=60.0)
    with running_server([path], target=target, cache=cache, arguments=arguments) as ready:
        url = f"127.0.0.1:{ready.grpc_port}"
        able = capacity(url, {bundle: 1.0}, plan, seconds)
        deadline = deadline_ms or max(_DEADLINE_FACTOR * able.alone_ms, _LEAST_DEADLINE_MS)
        arrivals = Arrivals(CONSTANT, factor * able.per_second)
        limits, records = _only(repr(deadline)), {policy: Record() for policy in policies}
        asked = {policy: Workload({bundle: 1.0}, choices=_only(policy), deadlines_ms=limits) for policy in policies}
        for _ in range(rounds):
            for policy, record in records.items():
                _burst(url, asked[policy], arrivals, seconds, record)
                time.sleep(_PAUSE_SECONDS)
                advanced()
    total = seconds * rounds
    bursts = tuple(_summary(policy, record.columns(), total) for policy, record in records.items())
    return GoodputReport(bundle.manifest.name, able.per_second, arrivals.rate, deadline, total, bursts)


def _only(value: str) -> Shares:
    return Shares((value,), (1.0,))


def _burst(url: str, workload: Workload, arrivals: Arrivals, seconds: float, record: Record) -> None:
    """Send requests at fixed times and wait for what comes of them."""
    sender = Sender(url, workload, record)
    times = limited(arrivals.times(), seconds)

    async def send() -> None:
        async with sender:
            await sender.open_loop(times)

    run(send, sender.interrupt)
    if sender.interrupted:
        raise KeyboardInterrupt
    columns = record.columns()
    other = columns.where(~np.isin(columns.outcome, (IN_TIME, LATE, REFUSED, EXPIRED)))
    if len(other):
        given = Literally(f"{other.outcome[0]}, {other.cause[0]}")
        expected = "an answer, a refusal or the end of the time"
        raise ServerError(f"server at {url}", given=given, expected=expected, fix="The server's log tells more.")


def _summary(policy: str, columns: Columns, seconds: float) -> Burst:
    good = columns.where(columns.outcome == IN_TIME)
    counts, latency = columns.counts(), Percentiles.of(good.latency)
    refused = counts.get(REFUSED, 0)
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
