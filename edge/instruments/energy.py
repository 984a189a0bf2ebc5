"""Energy of runs by model and tier: the board's power above idle, integrated while requests run.

Every 50 ms the meter checks for runs since its last sample, and if there were any, reads the rail of the whole board.
Power above idle, times the time since the last sample, goes into a pool. About once a second the pool is divided among
the tiers in proportion to the time of their runs. Idle power is the median of readings, one a second, at least a second
after the last run and while no model is loading. Nothing is counted until it is known.

The result is an estimate. Its errors:

- INA3221 rails have an error of one to a few per cent, and their driver averages over some milliseconds.
- A sample hits or misses a run that is shorter than 50 ms. That is right on average: the sum over many runs is good,
  the energy of a few is not.
- The board's power includes all other activity: other programs, the transport, the fan. Activity at the same time as
  requests counts as theirs.
- Clocks stay high for a moment after a run. That time is neither counted nor part of idle power.
- Idle power grows with temperature, and is not measured under continuous load.
- Runs on several threads share power in proportion to their time, although one may draw more than another.
- Runs that fail are not counted, and their energy goes to others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple, Protocol

from edge.instruments.sensors import SensorFile, find_sensors
from edge.instruments.snapshot import TierRuns

log = logging.getLogger(__name__)

#: Names of the rail of the whole board. Without one, the board's power is the sum of its rails.
_BOARD_RAILS: Final = ("VDD_IN", "POM_5V_IN", "VIN")
_SAMPLE_SECONDS: Final = 0.05
#: After this time without a run, the rail is read only for idle power.
_QUIET_SECONDS: Final = 5.0
_QUIET_SAMPLE_SECONDS: Final = 0.1
#: Time in which clocks and power settle after a run.
_SETTLE_SECONDS: Final = 1.0
_IDLE_SECONDS: Final = 1.0
_IDLE_SAMPLES: Final = 60
_LEAST_IDLE_SAMPLES: Final = 3
_DIVIDE_SECONDS: Final = 1.0
#: A longer time between two samples means that the machine was suspended.
_LONGEST_SECONDS: Final = 1.0


class ModelTier(NamedTuple):
    """A tier of a version of a model."""

    model: str
    version: str
    tier: str


class Activity(Protocol):
    """The activity of a server that takes energy. Called from the meter's thread."""

    def running(self) -> bool: ...  # whether a run is in progress
    def run_count(self) -> int: ...  # changes whenever a run ends
    def loading(self) -> bool: ...  # whether a model is loading
    def runs(self) -> Mapping[ModelTier, TierRuns]: ...  # since the start


class UnknownWork:
    """The activity of a board whose programs nobody asks: its energy is counted, and never known to be idle."""

    def running(self) -> bool:
        return False

    def run_count(self) -> int:
        return 0

    def loading(self) -> bool:
        return True

    def runs(self) -> Mapping[ModelTier, TierRuns]:
        return {}


@dataclass(slots=True)
class TierEnergy:
    """The energy of a tier's runs above idle, and their requests, rows and tokens as in ``TierRuns``."""

    joules: float = 0.0
    requests: int = 0
    rows: int = 0
    tokens: int = 0


class EnergyMeter:
    """Measures the energy of runs by ``rails``, whose sum is the board's power, on a thread of its own.

    ``idle_watts``, the board's power while nothing runs, is None while it is unknown. ``board_joules`` is the energy of
    the whole board since the start.
    """

    def __init__(self, rails: Sequence[SensorFile], work: Activity) -> None:
        self._rails, self._work = rails, work
        self._lock = threading.Lock()
        self._energy: dict[ModelTier, TierEnergy] = {}
        self._pool_joules = 0.0
        self._counted: Mapping[ModelTier, TierRuns] = {}
        self._idle: deque[float] = deque(maxlen=_IDLE_SAMPLES)
        self.idle_watts: float | None = None
        self.board_joules = 0.0
        self._read_at: float | None = None
        self._run_count = work.run_count()
        self._sampled_at: float | None = None
        self._ran_at = self._idle_at = self._divided_at = -_QUIET_SECONDS
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="energy", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def energy(self) -> dict[ModelTier, TierEnergy]:
        """Return the energy of each tier that has run since idle power is known."""
        with self._lock:
            return {key: replace(energy) for key, energy in self._energy.items()}

    def sample(self, now: float) -> float:
        """Take a sample at a time of ``time.monotonic()``, and return the seconds until the next one."""
        run_count = self._work.run_count()
        ran = self._work.running() or run_count != self._run_count
        self._run_count = run_count
        if ran:
            self._ran_at = now
        quiet = now - self._ran_at >= _QUIET_SECONDS
        idle = now - self._ran_at >= _SETTLE_SECONDS and now >= self._idle_at and not self._work.loading()
        due = self._read_at is None or now - self._read_at >= _IDLE_SECONDS
        watts = self._watts() if ran or idle or due else None
        if watts is not None:
            self._count(watts, now)
        if idle and watts is not None:
            self._idle_at = now + _IDLE_SECONDS
            self._learn_idle(watts)
        if ran and self.idle_watts is not None and watts is not None and self._sampled_at is not None:
            self._pool_joules += (watts - self.idle_watts) * min(now - self._sampled_at, _LONGEST_SECONDS)
        if not ran or watts is not None:  # otherwise the next sample covers this time too
            self._sampled_at = now
        if now - self._divided_at >= _DIVIDE_SECONDS and self.idle_watts is not None:
            self._divided_at = now
            self._divide(last=quiet)
        return _QUIET_SAMPLE_SECONDS if quiet else _SAMPLE_SECONDS

    def _count(self, watts: float, now: float) -> None:
        if self._read_at is not None:
            # At most one reading may be missing before; otherwise the machine was suspended, or a rail unreadable.
            self.board_joules += max(watts, 0.0) * min(now - self._read_at, 2 * _IDLE_SECONDS)
        self._read_at = now

    def _learn_idle(self, watts: float) -> None:
        self._idle.append(watts)
        if len(self._idle) < _LEAST_IDLE_SAMPLES:
            return
        if self.idle_watts is None:
            self._counted = self._work.runs()
        self.idle_watts = median(self._idle)

    def _divide(self, *, last: bool) -> None:
        """Divide the pool among the runs since the last division, and empty it.

        Without such runs, or while it is not positive, the pool is kept, unless this is the ``last`` division of a
        busy period.
        """
        runs = self._work.runs()
        before = {key: self._counted.get(key, TierRuns()) for key in runs}
        for key, then in before.items():
            if then.infer_ns > runs[key].infer_ns:  # the model was removed and added again
                before[key] = TierRuns()
        grown = {key: now.infer_ns - before[key].infer_ns for key, now in runs.items()}
        total = sum(grown.values())
        if total > 0 and (self._pool_joules > 0 or last):
            share = max(self._pool_joules, 0.0) / total
            with self._lock:
                for key, device_ns in grown.items():
                    if device_ns > 0:
                        energy = self._energy.setdefault(key, TierEnergy())
                        energy.joules += share * device_ns
                        energy.requests += runs[key].requests - before[key].requests
                        energy.rows += runs[key].rows - before[key].rows
                        energy.tokens += runs[key].tokens - before[key].tokens
            self._counted = runs
            self._pool_joules = 0.0
        elif last:
            self._pool_joules = 0.0

    def _watts(self) -> float | None:
        """Return the power of the board; None where a rail cannot be read."""
        powers = [power for rail in self._rails if (power := rail.read()) is not None]
        return sum(powers) if len(powers) == len(self._rails) else None

    def _run(self) -> None:
        wait_seconds = 0.0
        try:
            while not self._stop.wait(wait_seconds):
                wait_seconds = self.sample(time.monotonic())
        except Exception:
            log.exception("energy is no longer measured")


def board_rails(root: Path = Path("/")) -> list[SensorFile]:
    """Return the rails whose sum is the power of the whole board; empty on a machine without any."""
    rails = [sensor for sensor in find_sensors(root) if sensor.kind == "power"]
    return next(([rail] for name in _BOARD_RAILS for rail in rails if rail.name == name), rails)


def energy_meter(work: Callable[[], Activity], root: Path = Path("/")) -> EnergyMeter | None:
    """Return a meter; None on a machine without rails, where ``work`` is not called."""
    rails = board_rails(root)
    return EnergyMeter(rails, work()) if rails else None
