"""Outcome of every request of a load run, a row each."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge.datatypes import Array

#: Each request has one outcome.
#:
#: - ``in_time``, ``late``: it got a response, within its deadline or after it
#: - ``refused``: the server rejected it at once, perhaps with a time to retry after
#: - ``expired``: its deadline passed, here or in the server
#: - ``cancelled``: by this client, after an interrupt, or by the server
#: - ``failed``: any other error, also that there was no connection
#: - ``lost``: it was sent, and no response came
#: - ``unsent``: too many others were in flight
OUTCOMES = ("in_time", "late", "refused", "expired", "cancelled", "failed", "lost", "unsent")
IN_TIME, LATE, REFUSED, EXPIRED, CANCELLED, FAILED, LOST, UNSENT = OUTCOMES
_MAX_NAMES = 1000
_CODES = {outcome: code for code, outcome in enumerate(OUTCOMES)}
_NAMES = ("due", "lag", "latency", "retry_ms", "loops", "outcome", "kind", "tier", "cause")
_TYPECODES = dict(zip(_NAMES, "dddddBHHH", strict=True))


class Record:
    """Rows of one run, about 50 bytes each. A request that never ends stays ``lost``. Not thread-safe."""

    def __init__(self) -> None:
        self._columns: dict[str, array[Any]] = {name: array(code) for name, code in _TYPECODES.items()}
        self._names: dict[str, int] = {"": 0}

    def __len__(self) -> int:
        return len(self._columns["due"])

    def sent(self, due: float, lag: float, kind: int) -> int:
        """Add a request, due ``due`` seconds after the start and sent ``lag`` seconds later; return its row."""
        row = (due, lag, math.nan, math.nan, math.nan, _CODES[LOST], kind, 0, 0)
        for column, value in zip(self._columns.values(), row, strict=True):
            column.append(value)
        return len(self) - 1

    def answered(self, row: int, latency: float, *, late: bool, tier: str = "", loops: float = math.nan) -> None:
        """End a request with a response, ``latency`` seconds after it was due; ``loops`` is the mean of its rows."""
        self._columns["latency"][row] = latency
        self._columns["outcome"][row] = _CODES[LATE if late else IN_TIME]
        self._columns["tier"][row] = self._number(tier)
        self._columns["loops"][row] = loops

    def ended(self, row: int, latency: float, outcome: str, cause: str = "", retry_ms: float | None = None) -> None:
        """End a request without a response: the cause in a few words, and the server's hint when to retry."""
        self._columns["latency"][row] = latency
        self._columns["outcome"][row] = _CODES[outcome]
        self._columns["cause"][row] = self._number(cause)
        if retry_ms is not None:
            self._columns["retry_ms"][row] = retry_ms

    def columns(self) -> Columns:
        """Return a copy of all rows."""
        arrays = {name: np.array(column) for name, column in self._columns.items()}
        names = np.array(list(self._names))
        texts = {name: names[arrays[name]] for name in ("tier", "cause")}
        return Columns(**(arrays | texts | {"outcome": np.array(OUTCOMES)[arrays["outcome"]]}))

    def _number(self, name: str) -> int:
        if name not in self._names and len(self._names) >= _MAX_NAMES:
            name = "other"  # bounds the memory where every message differs
        return self._names.setdefault(name, len(self._names))


@dataclass(frozen=True)
class Columns:
    """Rows of a record as arrays [requests]. Times are in seconds except ``retry_ms``; what is absent is NaN."""

    due: Array
    lag: Array
    latency: Array
    retry_ms: Array
    loops: Array
    outcome: Array
    kind: Array
    tier: Array
    cause: Array

    def __len__(self) -> int:
        return len(self.due)

    @property
    def answered(self) -> Array:
        """Mask [requests] of those with a response, in time or late."""
        return np.isin(self.outcome, (IN_TIME, LATE))

    def where(self, mask: Array) -> Columns:
        """Return the rows selected by a mask [requests]."""
        return Columns(**{name: column[mask] for name, column in vars(self).items()})

    def counts(self) -> dict[str, int]:
        """Return the number of requests with each outcome that occurred."""
        found = {outcome: int(np.count_nonzero(self.outcome == outcome)) for outcome in OUTCOMES}
        return {outcome: count for outcome, count in found.items() if count}
