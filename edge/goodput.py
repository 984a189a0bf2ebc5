"""What a server is worth when more is asked of it than it can do: answers within the deadline, by policy.

Requests come at fixed times, whether the answers keep up or not: clients that wait for each other would ask for less as
soon as the server is slow, and hide what an overload does.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from edge.bench import direct_inputs, series
from edge.bundle import Bundle
from edge.client import Client
from edge.datatypes import Array
from edge.elastic import PINNED
from edge.errors import Literally, ServerError, UsageError
from edge.launch import running_server

_CAPACITY_CLIENTS = 8
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
        policies: what the requests ask for; see :mod:`edge.elastic`.
        factor: how many times its capacity is asked of the full tier.
        seconds: of each burst.
        rounds: bursts of each policy, in turns, so that a noisy neighbour disturbs all alike.
        deadline_ms: of each request; None is 20 times what one takes, and 50 at least.
        target: the backend.
        cache: where built models lie.
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
    inputs = direct_inputs(bundle, 1)
    with running_server([path], target=target, cache=cache, arguments=arguments) as ready:
        url = f"127.0.0.1:{ready.grpc_port}"
        capacity, alone_ms = _capacity(url, bundle.manifest.name, inputs, seconds)
        deadline = deadline_ms or max(_DEADLINE_FACTOR * alone_ms, _LEAST_DEADLINE_MS)
        rate = factor * capacity
        results = {policy: _Outcomes() for policy in policies}
        with Client(url, deadline / 1e3) as client:
            for _ in range(rounds):
                for policy, outcomes in results.items():
                    _burst(client, bundle.manifest.name, policy, inputs, rate, seconds, outcomes)
                    time.sleep(_PAUSE_SECONDS)
                    advanced()
    total = seconds * rounds
    bursts = tuple(outcomes.report(policy, deadline, total) for policy, outcomes in results.items())
    return GoodputReport(bundle.manifest.name, capacity, rate, deadline, total, bursts)


def _capacity(url: str, model: str, inputs: list[dict[str, Array]], seconds: float) -> tuple[float, float]:
    """Return what the full tier answers in a second, and the median in ms of a client that is alone."""
    with Client(url, 60.0) as client:

        def call(arrays: dict[str, Array]) -> None:
            client.infer(model, arrays, policy=PINNED)

        warm = series(call, inputs, 10, 1)
        each = float(np.median(warm.durations_ns))
        count = max(int(seconds * 1e9 / each), 2 * _CAPACITY_CLIENTS)
        busy = series(call, inputs, count, _CAPACITY_CLIENTS)
    return len(busy.durations_ns) / (busy.wall_ns / 1e9), each / 1e6


class _Outcomes:
    """What came of requests, from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: list[tuple[float, str]] = []
        self._codes: Counter[str] = Counter()
        self._lags: list[float] = []
        self.failure: BaseException | None = None

    def sent(self, lag_ms: float) -> None:
        with self._lock:
            self._lags.append(lag_ms)

    def answered(self, milliseconds: float, tier: str) -> None:
        with self._lock:
            self._answers.append((milliseconds, tier))

    def ended(self, code: str) -> None:
        with self._lock:
            self._codes[code] += 1

    def report(self, policy: str, deadline_ms: float, seconds: float) -> Burst:
        good = [(latency, tier) for latency, tier in self._answers if latency <= deadline_ms]
        sent, refused = len(self._answers) + self._codes.total(), self._codes["RESOURCE_EXHAUSTED"]
        p50, p99 = np.percentile([latency for latency, _ in good] or [0.0], [50, 99]).tolist()
        return Burst(
            policy=policy,
            sent=sent,
            in_time=len(good),
            refused=refused,
            late=sent - refused - len(good),
            per_second=len(good) / seconds,
            p50_ms=p50,
            p99_ms=p99,
            tiers=dict(Counter(tier for _, tier in good)),
            lag_p99_ms=float(np.percentile(self._lags, 99)),
        )


def _burst(
    client: Client,
    model: str,
    policy: str,
    inputs: list[dict[str, Array]],
    rate: float,
    seconds: float,
    outcomes: _Outcomes,
) -> None:
    """Send requests at fixed times, each on a thread of its own, and wait for what comes of them."""

    def ask(index: int, due: float) -> None:
        outcomes.sent((time.perf_counter() - due) * 1e3)
        try:
            result = client.infer(model, inputs[index % len(inputs)], policy=policy)
            # From when it was due: a client that is late itself is no excuse.
            outcomes.answered((time.perf_counter() - due) * 1e3, result.tier)
        except ServerError as error:
            code = str(error.given).partition(" ")[0]
            if code not in ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"):
                outcomes.failure = error
            outcomes.ended(code)

    threads = []
    begun = time.perf_counter()
    for index in range(max(int(rate * seconds), 1)):
        due = begun + index / rate
        time.sleep(max(due - time.perf_counter(), 0.0))
        thread = threading.Thread(target=ask, args=(index, due))
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    if outcomes.failure:
        raise outcomes.failure
