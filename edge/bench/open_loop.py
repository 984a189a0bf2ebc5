"""Open loop against a server: its capacity, requests at fixed times, its memory meanwhile, and goodput by policy."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge.bench.plan import CONSTANT, LoadPlan, due_times, limited
from edge.bench.report import LoadReport, ServerMemory, outcomes_of, report_of
from edge.bench.sender import EXPIRED, IN_TIME, LATE, REFUSED, Sender, run
from edge.bench.timing import Percentiles
from edge.bench.workload import Workload
from edge.bundles.bundle import Bundle
from edge.client import Client
from edge.client.connection import Credentials
from edge.errors import Raw, ServerError, UsageError
from edge.launch import running_server
from edge.scheduling.tier_selection import PINNED

_CAPACITY_CLIENTS = 8
_ALONE_REQUESTS = 10
_MEMORY_SECONDS = 1.0
#: The default deadline, as a multiple of a request's latency on an idle server, and its minimum.
_DEADLINE_FACTOR, _LEAST_DEADLINE_MS = 20.0, 50.0
#: Pause between bursts, in which the server recovers.
_PAUSE_SECONDS = 1.0


class Capacity(NamedTuple):
    """Performance in a closed loop: responses per second to eight clients, and the median in ms of one alone."""

    per_second: float
    alone_ms: float


def capacity(url: str, bundles: Mapping[Bundle, float], plan: LoadPlan, seconds: float) -> Capacity:
    """Measure the capacity for a plan's requests by full tiers, without deadlines."""
    unlimited = 10_000  # the plan may allow fewer requests at once than there are clients here
    full = msgspec.structs.replace(plan, deadlines_ms={}, policies={PINNED: 1.0}, max_outstanding=unlimited)
    workload = Workload(bundles, full)
    alone, busy = Sender(url, workload, msgspec.structs.replace(full, channels=1)), Sender(url, workload, full)

    async def send() -> float:
        async with alone:
            await alone.closed_loop(1, 0.0, _ALONE_REQUESTS)
        async with busy:
            return await busy.closed_loop(_CAPACITY_CLIENTS, seconds, 2)

    elapsed = run(send, alone, busy)
    if alone.interrupted:
        raise KeyboardInterrupt
    for request in (*alone.sent, *busy.sent):
        if not request.answered:
            given, fix = (
                Raw(f"{request.cause} for a request"),
                "Reduce the load on it, or give --rate in numbers.",
            )
            raise ServerError(f"server at {url}", given=given, expected="a response to each request", fix=fix)
    return Capacity(len(busy.sent) / elapsed, Percentiles.of([sent.latency_seconds for sent in alone.sent]).p50_ms)


def measure(
    url: str, bundles: Mapping[Bundle, float], plan: LoadPlan, *, advanced: Callable[[float], None] = lambda share: None
) -> LoadReport:
    """Send a plan's requests for bundles, by the part of each, and report their outcomes.

    ``advanced`` receives the elapsed share of the run, 0 to 1. Errors before the first request, also an interrupt, are
    raised; later ones are outcomes of requests.
    """
    workload = Workload(bundles, plan)
    per_second: float | None = None
    with Client(url, credentials=plan.credentials) as client:
        for bundle in bundles:
            client.metadata(bundle.manifest.name, str(bundle.manifest.version))
    if plan.rate and plan.rate.of_capacity:
        per_second = capacity(url, bundles, plan, min(max(plan.seconds / 3, 0.3), 5.0)).per_second
    rate, times, warm_up = _schedule(plan, per_second)
    sender = Sender(url, workload, plan)
    last = warm_up + (plan.requests / rate if plan.requests else plan.seconds)

    async def send() -> None:
        async with sender:
            await sender.open_loop(times, lambda now: advanced(min(now / last, 1.0)))

    with _memory(url, plan.credentials) as sizes:
        run(send, sender)
    advanced(1.0)
    return report_of(
        plan,
        sender.sent,
        (bundle.manifest.name for bundle in bundles),
        rate=rate,
        capacity=per_second,
        warm_up_seconds=warm_up,
        interrupted=sender.interrupted,
        memory=ServerMemory(sizes[0], sizes[-1], max(sizes)) if sizes else None,
    )


def _schedule(plan: LoadPlan, capacity_per_second: float | None) -> tuple[float, Iterator[float], float]:
    """Return the rate, all times, and the seconds of the warm-up at their start."""
    if plan.trace:
        last = min(plan.trace[-1], plan.seconds)
        return len(plan.trace) / max(last, 1e-9), limited(plan.trace, plan.seconds, plan.requests), 0.0
    assert plan.rate is not None
    rate, warm_up, requests = plan.rate.value * (capacity_per_second or 1.0), plan.warm_up_seconds, plan.requests
    if requests is not None:
        requests += sum(1 for _ in limited(due_times(plan.pattern, rate, plan.seed), warm_up))
    return rate, limited(due_times(plan.pattern, rate, plan.seed), warm_up + plan.seconds, requests), warm_up


@contextmanager
def _memory(url: str, credentials: Credentials | None) -> Iterator[list[int]]:
    """Yield a list of a server's resident memory in bytes, read at the start, every second, and at the end."""
    sizes, done = list[int](), threading.Event()
    # The timeout keeps a frozen server from delaying the report.
    with Client(url, _MEMORY_SECONDS, credentials=credentials) as client:

        def read() -> None:
            with suppress(ServerError):  # the outcomes of the requests show why
                sizes.extend(one.size_bytes for one in client.telemetry().memory if one.kind == "process_rss")

        def watch() -> None:
            while not done.wait(_MEMORY_SECONDS):
                read()

        read()
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield sizes
        finally:
            done.set()
            thread.join()
            read()


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
    plan = LoadPlan(patience_seconds=60.0)
    with running_server([path], target=target, cache=cache) as ready:
        url = f"127.0.0.1:{ready.grpc_port}"
        idle = capacity(url, {bundle: 1.0}, plan, seconds)
        deadline = deadline_ms or max(_DEADLINE_FACTOR * idle.alone_ms, _LEAST_DEADLINE_MS)
        rate = factor * idle.per_second
        senders = []
        for policy in policies:
            of_policy = msgspec.structs.replace(plan, policies={policy: 1.0}, deadlines_ms={deadline: 1.0})
            senders.append(Sender(url, Workload({bundle: 1.0}, of_policy), of_policy))
        for _ in range(rounds):
            for sender in senders:
                _send_burst(url, sender, rate, seconds)
                time.sleep(_PAUSE_SECONDS)
                advanced()
    total = seconds * rounds
    bursts = tuple(_summary(policy, sender, total) for policy, sender in zip(policies, senders, strict=True))
    return GoodputReport(bundle.manifest.name, idle.per_second, rate, deadline, total, bursts)


def _send_burst(url: str, sender: Sender, rate: float, seconds: float) -> None:
    async def send() -> None:
        async with sender:
            await sender.open_loop(limited(due_times(CONSTANT, rate), seconds))

    run(send, sender)
    if sender.interrupted:
        raise KeyboardInterrupt
    for sent in sender.sent:
        if sent.outcome not in (IN_TIME, LATE, REFUSED, EXPIRED):
            given, expected = Raw(f"{sent.outcome}, {sent.cause}"), "an answer, a refusal or a missed deadline"
            raise ServerError(f"server at {url}", given=given, expected=expected, fix="Look into the server's log.")


def _summary(policy: str, sender: Sender, seconds: float) -> Burst:
    good = [sent for sent in sender.sent if sent.outcome == IN_TIME]
    latency, refused = Percentiles.of([sent.latency_seconds for sent in good]), outcomes_of(sender.sent).get(REFUSED, 0)
    return Burst(
        policy=policy,
        sent=len(sender.sent),
        in_time=len(good),
        refused=refused,
        late=len(sender.sent) - len(good) - refused,
        per_second=len(good) / seconds,
        p50_ms=latency.p50_ms,
        p99_ms=latency.p99_ms,
        tiers=dict(Counter(sent.tier for sent in good)),
        lag_p99_ms=Percentiles.of([sent.lag_seconds for sent in sender.sent]).p99_ms,
    )
