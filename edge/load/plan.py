"""Options of a load run."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from edge.errors import UsageError

if TYPE_CHECKING:
    from edge.client.connection import Credentials

PATTERNS = POISSON, CONSTANT, BURST = ("poisson", "constant", "burst")
#: What ends a request at its deadline: the client's gRPC; the server, by the parameter ``timeout``, whose response the
#: client waits for; or whichever is first.
ENFORCERS: Final = ("client", "server", "both")
_MIX_FIX: Final = "Write VALUE, or VALUE=PARTS,VALUE=PARTS, such as 1=1,5=9."


class Rate(NamedTuple):
    """Requests per second, or a multiple of the measured capacity."""

    value: float
    of_capacity: bool

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Read ``200`` or ``3x``; raise a UsageError for anything else."""
        value = _number(text.removesuffix("x"))
        if not 0 < value < math.inf:
            fix = "Write requests per second, such as 200, or times the measured capacity, such as 3x."
            raise UsageError("--rate", given=text, expected="a number above 0", fix=fix)
        return cls(value, text.endswith("x"))


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Requests to send, and when.

    A mix maps values to their parts of all requests; an empty one leaves the value to the server.

    Attributes:
        rate: None with a trace.
        pattern: ``poisson``, with independent exponential gaps; ``constant``; or ``burst``, a Poisson process that
            pauses in the second half of each second.
        trace: recorded arrivals in place of a pattern, in seconds from the first.
        seed: of arrivals and requests; equal seeds give equal runs.
        seconds: length of the measurement.
        requests: limit of their number.
        warm_up_seconds: time before the measurement, at the same rate; a trace has none.
        policies: mix of policies and tiers.
        deadlines_ms: mix of deadlines, which count from when a request is due.
        max_loops: mix of budgets of looped models.
        tolerances: mix of tolerances of looped models.
        enforcer: one of :data:`ENFORCERS`.
        texts: lines to send in place of the golden inputs, with a tab between the texts of a pair.
        patience_seconds: time after which a response is lost if no deadline of the client ends the request.
        max_outstanding: limit of requests in flight; further ones are not sent, so that memory stays bounded.
    """

    rate: Rate | None = None
    pattern: str = POISSON
    trace: array[float] | None = None
    seed: int = 0
    seconds: float = 10.0
    requests: int | None = None
    warm_up_seconds: float = 1.0
    rows: int = 1
    policies: dict[str, float] = {}
    priorities: dict[float, float] = {}
    deadlines_ms: dict[float, float] = {}
    max_loops: dict[float, float] = {}
    tolerances: dict[float, float] = {}
    enforcer: str = "client"
    texts: tuple[str, ...] = ()
    channels: int = 4
    patience_seconds: float = 30.0
    max_outstanding: int = 10_000
    credentials: Credentials | None = None


def parse_mix(option: str, text: str) -> dict[str, float]:
    """Read ``VALUE`` or ``VALUE=PARTS,VALUE=PARTS``; raise a UsageError for anything else."""
    mix: dict[str, float] = {}
    for item in text.split(","):
        value, _, part = item.strip().partition("=")
        parts = _number(part or "1")
        if not value or not 0 < parts < math.inf:
            raise UsageError(option, given=item, expected="a value and its parts, a number above 0", fix=_MIX_FIX)
        mix[value] = mix.get(value, 0.0) + parts
    return mix


def parse_number_mix(option: str, text: str, least: float, most: float, *, whole: bool = False) -> dict[float, float]:
    """Read a mix of numbers, or whole numbers, from ``least`` to ``most``; as :func:`parse_mix`."""
    mix: dict[float, float] = {}
    for value, parts in parse_mix(option, text).items():
        number = _number(value)
        if not least <= number <= most or (whole and not number.is_integer()):
            expected = f"{least:g} to {most:g}" if most < math.inf else f"{least:g} or more"
            expected = f"a whole number, {expected}" if whole else expected
            raise UsageError(option, given=value, expected=expected, fix=_MIX_FIX)
        mix[number] = mix.get(number, 0.0) + parts
    return mix


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
