"""Energy of runs by model and tier: the board's power above idle, integrated while requests run.

The sampler looks every 50 ms whether something ran since it last looked, and reads the rail of the whole board. Power
above idle, times the time since the last look, goes into a pool. About once a second the pool is divided among the
tiers in proportion to the time that their runs took on the device. Idle power is the median of readings, one a second,
that were taken at least a second after the last run and while no model was loaded. Nothing is counted before it is
known.

The result is an estimate. Its errors:

- INA3221 rails have an error of one to a few per cent, and their driver averages over some milliseconds.
- A run that is shorter than 50 ms is hit by a sample or not. That is right on average, so the sum over many runs is
  good, and the energy of a few is not.
- The board's power includes everything else that works meanwhile: other programs, the transport, the fan. What
  runs at the same time as requests is counted as theirs.
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
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple, Protocol

from edge.instruments.sensor_files import SensorFile, find_sensors
from edge.instruments.snapshot import TierRuns

log = logging.getLogger(__name__)

#: The rail of the whole board. Boards without one are the sum of their rails.
_BOARD_RAILS: Final = ("VDD_IN", "POM_5V_IN", "VIN")
_SAMPLE_SECONDS: Final = 0.05
#: Without a run for so long, the rail is read only for idle power.
_QUIET_SECONDS: Final = 5.0
_QUIET_LOOK_SECONDS: Final = 0.1
#: Clocks and power settle for so long after a run.
_SETTLE_SECONDS: Final = 1.0
_IDLE_SECONDS: Final = 1.0
_IDLE_SAMPLES: Final = 60
_LEAST_IDLE_SAMPLES: Final = 3
_DIVIDE_SECONDS: Final = 1.0
#: A longer time between two looks is a machine that was suspended.
_LONGEST_SECONDS: Final = 1.0


class ModelTier(NamedTuple):
    """A tier of a version of a model."""

    model: str
    version: str
    tier: str


class Work(Protocol):
    """The work of a server, as far as it takes energy. Called from the sampler's thread."""

    def running(self) -> bool:
        """Return whether a run is in progress."""

    def run_count(self) -> int:
        """Return a number that changes whenever a run ends."""

    def loading(self) -> bool:
        """Return whether a model is being loaded."""

    def runs(self) -> Mapping[ModelTier, TierRuns]:
        """Return what ran since the start."""


@dataclass(slots=True)
class TierEnergy:
    """The energy of a tier's runs, and the requests and rows that it answered with it.

    Attributes:
        joules: above idle.
        requests: of the runs.
        rows: of the requests.
        tokens: rows times tokens where the model has a sequence axis, else rows.
    """

    joules: float = 0.0
    requests: int = 0
    rows: int = 0
    tokens: int = 0


class EnergyMeter:
    """Measures the energy of runs, on a thread of its own while it is entered as a context.

    Args:
        rails: whose power is the board's, all together.
        work: what runs.

    Attributes:
        idle_watts: the board's power while nothing runs; None while it is unknown.
    """

    def __init__(self, rails: Sequence[SensorFile], work: Work) -> None:
        self._rails = rails
        self._work = work
        self._lock = threading.Lock()
        self._energy: dict[ModelTier, TierEnergy] = {}
        self._pool_joules = 0.0
        self._counted: Mapping[ModelTier, TierRuns] = {}
        self._idle: deque[float] = deque(maxlen=_IDLE_SAMPLES)
        self.idle_watts: float | None = None
        self._run_count = work.run_count()
        self._looked_at: float | None = None
        self._ran_at = self._idle_at = self._divided_at = -_QUIET_SECONDS
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="energy", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def energy(self) -> dict[ModelTier, TierEnergy]:
        """Return the energy of each tier that has run since idle power is known."""
        with self._lock:
            return {key: TierEnergy(of.joules, of.requests, of.rows, of.tokens) for key, of in self._energy.items()}

    def look(self, now: float) -> float:
        """Take a sample.

        Args:
            now: ``time.monotonic()``.

        Returns:
            The seconds until the next look.
        """
        run_count = self._work.run_count()
        ran = self._work.running() or run_count != self._run_count
        self._run_count = run_count
        if ran:
            self._ran_at = now
        quiet = now - self._ran_at >= _QUIET_SECONDS
        idle = now - self._ran_at >= _SETTLE_SECONDS and now >= self._idle_at and not self._work.loading()
        watts = self._watts() if ran or idle else None
        if idle and watts is not None:
            self._idle_at = now + _IDLE_SECONDS
            self._learn_idle(watts)
        if ran and self.idle_watts is not None and watts is not None and self._looked_at is not None:
            self._pool_joules += (watts - self.idle_watts) * min(now - self._looked_at, _LONGEST_SECONDS)
        if not ran or watts is not None:  # otherwise the next sample counts for this time, too
            self._looked_at = now
        if now - self._divided_at >= _DIVIDE_SECONDS and self.idle_watts is not None:
            self._divided_at = now
            self._divide(last=quiet)
        return _QUIET_LOOK_SECONDS if quiet else _SAMPLE_SECONDS

    def _learn_idle(self, watts: float) -> None:
        self._idle.append(watts)
        if len(self._idle) < _LEAST_IDLE_SAMPLES:
            return
        if self.idle_watts is None:
            self._counted = self._work.runs()
        self.idle_watts = median(self._idle)

    def _divide(self, *, last: bool) -> None:
        """Divide the pool among what ran since it was divided before.

        Args:
            last: whether everything has ended; what is left of the pool is noise then.
        """
        runs = self._work.runs()
        before = {key: self._counted.get(key, TierRuns()) for key in runs}
        for key, then in before.items():
            if then.infer_ns > runs[key].infer_ns:  # the model was removed and came again
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

    def _sample(self) -> None:
        wait = 0.0
        try:
            while not self._stop.wait(wait):
                wait = self.look(time.monotonic())
        except Exception:
            log.exception("energy is not measured any more")


def board_rails(root: Path = Path("/")) -> list[SensorFile]:
    """Return the rails whose power is the whole board's; none on a machine without any."""
    rails = [sensor for sensor in find_sensors(root) if sensor.kind == "power"]
    return next(([rail] for name in _BOARD_RAILS for rail in rails if rail.name == name), rails)


def energy_meter(work: Callable[[], Work], root: Path = Path("/")) -> EnergyMeter | None:
    """Return a meter for a server's work; None on a machine without rails.

    Args:
        work: makes the view of the work, where there are rails.
        root: the root of the file system, another one in tests.
    """
    rails = board_rails(root)
    return EnergyMeter(rails, work()) if rails else None
