"""Measures the effect of an attack on a server, and judges whether the server held.

*Held* means that the waits of a well-behaved client stay below :data:`WORST_MS` and none of its calls fails, that the
server's memory stays below :data:`MOST_RSS_MB` and its log grows by less than :data:`MOST_LOG_MB`, that waits,
processor and open files are as before within :data:`RECOVERY_SECONDS` of the attack's end, and that the server then
ends with exit code 0.

A slow or busy machine lengthens the limits of waits and of the recovery by the factor by which it is slower than the
machine on which they were set: a loop of :data:`_STEPS` steps takes :data:`_REFERENCE_SECONDS` there, and the factor is
never below 1. The loop runs before and after each attack, when nothing else of the test runs. A wait may also be longer
by the time in it for which others than the server had the processors that its event loop waited for, or by the longest
pause of the witness, which reads every :data:`READ_SECONDS` and waits for no answer of the server then, but by this at
most by as much again.
"""

import statistics
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import grpc

from tests.attacks.target import Setup, Target
from tests.attacks.witness import DOORS, READ_SECONDS, Call

WORST_MS, MOST_RSS_MB, MOST_LOG_MB, RECOVERY_SECONDS = 600, 600, 1, 5.0
_STEPS, _REFERENCE_SECONDS = 300_000, 0.02
#: A well-behaved client is as before if its median wait is at most this many times the one before the attack.
_CALM, _CALM_MS = 4, 10
#: How much of one core the server may use, and how many more files than before it may hold open, once it is calm.
_CALM_CORE, _CALM_FILES = 0.6, 8
#: For each verdict on calmness.
_WINDOW_SECONDS = 0.3
_MB = 1e6

Run = Callable[[Target], str | None]


@dataclass(frozen=True)
class Attack:
    """An attack: a function that returns what the attacker gained, if anything.

    Attributes:
        transports: those whose code it meets.
        setup: of the server.
        spares: the doors that others may find closed meanwhile, such as that whose connections it takes up.
    """

    name: str
    run: Run
    transports: tuple[str, ...] = ("nghttp2", "grpcio")
    setup: Setup = field(default_factory=Setup)
    spares: tuple[str, ...] = ()


#: All attacks by name, in the order of their definition.
ATTACKS = {}


def attack(doors=("",), **options):
    """Add a function to :data:`ATTACKS`, for each door; ``options`` are the attributes of its :class:`Attack`."""

    def add(run):
        for door in doors:
            name = "-".join(filter(None, (run.__name__.replace("_", "-"), door)))
            assert name not in ATTACKS
            ATTACKS[name] = Attack(name, partial(run, door=door) if door else run, **options)
        return run

    return add


@dataclass
class Measured:
    """The measurements of one attack; ``problems`` is empty if the server held."""

    problems: list[str]
    worst_ms: float = 0.0
    median_ms: float = 0.0
    rss_mb: float = 0.0
    kept_mb: float = 0.0
    log_mb: float = 0.0
    recovery_s: float = 0.0
    seconds: float = 0.0


def slowness():
    """Return the factor by which this machine is slower than the reference, at least 1."""
    start = time.perf_counter()
    for _ in range(_STEPS):
        pass
    return max(1.0, (time.perf_counter() - start) / _REFERENCE_SECONDS)


def measure(target, attack):
    """Attack a calm server, and wait until it is calm again."""
    slow = slowness()
    doors = [door for door in DOORS if door not in attack.spares]
    _wait(lambda: all(len(target.calls.get(door, ())) > 1 for door in DOORS), RECOVERY_SECONDS)
    quiet = statistics.median(call.seconds for call in target.calls["live"][-20:])
    first = target.readings[-1]
    start = time.monotonic()
    gained = None
    with suppress(OSError, grpc.RpcError):  # the server closed the connection, as it should
        gained = attack.run(target)
    end = time.monotonic()
    calm = _wait(lambda: _is_calm(target, doors, quiet, first.files), RECOVERY_SECONDS * slow)
    now = time.monotonic()
    readings = [first, *(reading for reading in target.readings if reading.at >= start)]
    pause = max([later.at - earlier.at - READ_SECONDS for earlier, later in pairwise(readings)], default=0.0)
    calls = [call for door in doors for call in target.calls[door] if call.start + call.seconds >= start]
    for door in doors:  # a call that has not ended yet counts, too
        begun = _last_end(target, door) + DOORS[door]
        calls.append(Call(door, begun, now - begun, ""))
    # A pause of the witness is the machine's up to a point; an attack that takes every core is no excuse.
    excused = min(pause, WORST_MS / 1000)
    counted = [call.seconds - max(_starved_seconds(readings, call), excused) for call in calls]
    slowest = calls[counted.index(max(counted))]
    worst_ms, limit_ms = 1000 * slowest.seconds, WORST_MS * max(slow, slowness())
    rss_mb = max(reading.rss_bytes for reading in readings) / _MB
    log_mb = (readings[-1].log_bytes - first.log_bytes) / _MB
    failed = {f"{call.door}: {call.error}" for call in calls if call.error}
    problems = {
        gained or "": bool(gained),
        f"{slowest.door}: a wait of {worst_ms:.0f} ms": 1000 * max(counted) > limit_ms,
        **{f"a failed call ({error})": True for error in sorted(failed)[:2]},
        f"{rss_mb:.0f} MB": rss_mb > MOST_RSS_MB,
        f"{log_mb:.0f} MB of log": log_mb > MOST_LOG_MB,
        "not calm again": not calm,
        "the server is gone": not target.alive,
    }
    result = Measured([problem for problem, found in problems.items() if found], worst_ms, rss_mb=rss_mb, log_mb=log_mb)
    result.median_ms = 1000 * statistics.median(call.seconds for call in calls if call.door == "live")
    result.kept_mb = (readings[-1].rss_bytes - first.rss_bytes) / _MB
    result.recovery_s, result.seconds = now - end, end - start
    return result


def _starved_seconds(readings, call):
    """Return for how long the server's event loop was starved in a call."""
    ends = call.start, call.start + call.seconds
    before, after = (bisect_right(readings, at, key=lambda reading: reading.at) - 1 for at in ends)
    return readings[max(after, 0)].starved_seconds - readings[max(before, 0)].starved_seconds


def _last_end(target, door):
    last = target.calls[door][-1]
    return last.start + last.seconds


def _is_calm(target, doors, quiet, files):
    now = time.monotonic()
    since = now - _WINDOW_SECONDS
    waits = [call.seconds for call in target.calls["live"][-100:] if call.start >= since]
    readings = [reading for reading in target.readings[-50:] if reading.at >= since]
    if len(waits) < 5 or len(readings) < 5 or any(now - _last_end(target, door) > 1.0 for door in doors):
        return False
    used = (readings[-1].cpu_seconds - readings[0].cpu_seconds) / (readings[-1].at - readings[0].at)
    is_quick = statistics.median(waits) <= max(_CALM * quiet, _CALM_MS / 1000)
    return is_quick and used <= _CALM_CORE and readings[-1].files <= files + _CALM_FILES


def _wait(reached, seconds):
    end = time.monotonic() + seconds
    while not (found := reached()) and time.monotonic() < end:
        time.sleep(0.05)
    return found
