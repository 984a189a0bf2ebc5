"""State of the board during a measurement: power mode, clock limits, throttling, temperature and power.

A measurement is steady if the board had one power mode and the same clock limits throughout, and did not throttle.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec

from edge.instruments.board import Board, read_board
from edge.instruments.energy import board_rails
from edge.instruments.kernel_files import entries, read_text, whole
from edge.instruments.memory import MemorySampler
from edge.instruments.sensors import Sensors

_POLICIES = "sys/devices/system/cpu/cpufreq"
_ONLINE = "sys/devices/system/cpu/online"
_STATE_SECONDS = 1.0
_POWER_SECONDS = 0.1
#: Least number of power samples for the mean of a series.
_LEAST_SAMPLES = 3


class BoardState(msgspec.Struct, frozen=True, kw_only=True):
    """The board at one moment; values that cannot be read are absent.

    Attributes:
        board: model, release and power mode; None on a machine that is not a Jetson.
        processors: online processors, such as ``0-5``; None if unknown.
        limits_hertz: clock limits, such as ``gpu-max``, ``emc-max`` and ``cpu0-max``.
        throttling_events: alarms since the boot.
        throttling_levels: active throttling, 0 for none.
        memory_bytes: of the system and the device, such as ``system_available`` and ``device_used``.
    """

    board: Board | None = None
    processors: str | None = None
    limits_hertz: dict[str, float] = {}
    frequencies_hertz: dict[str, float] = {}
    temperatures_celsius: dict[str, float] = {}
    power_watts: dict[str, float] = {}
    throttling_events: dict[str, float] = {}
    throttling_levels: dict[str, float] = {}
    memory_bytes: dict[str, float] = {}

    @classmethod
    def read(cls, sensors: Sensors, root: Path) -> BoardState:
        """Read everything below the root of a file system."""
        processors: dict[str, float] = {}
        for policy in entries(root / _POLICIES, "policy"):
            for bound in ("min", "max"):
                kilohertz = whole(read_text(policy / f"scaling_{bound}_freq"))
                if kilohertz is not None:
                    processors[f"cpu{policy.name.removeprefix('policy')}-{bound}"] = kilohertz * 1e3
        memory = MemorySampler(root).sample()
        found: dict[tuple[str, str], dict[str, float]] = {}
        for reading in sensors.sample():
            found.setdefault((reading.kind, reading.unit), {})[reading.name] = reading.value
        return cls(
            board=read_board(root),
            processors=read_text(root / _ONLINE) or None,
            limits_hertz=found.get(("frequency_limit", "hertz"), {}) | processors,
            frequencies_hertz=found.get(("frequency", "hertz"), {}),
            temperatures_celsius=found.get(("temperature", "celsius"), {}),
            power_watts=found.get(("power", "watts"), {}),
            throttling_events=found.get(("throttling", "events"), {}),
            throttling_levels=found.get(("throttling", "level"), {}),
            memory_bytes={one.kind: one.size_bytes for one in memory if one.kind.startswith(("system_", "device_"))},
        )

    def doubts(self) -> list[str]:
        """Return the reasons not to publish measurements in this state."""
        found = [f"throttled: {name} was on" for name, level in self.throttling_levels.items() if level]
        if self.board and self.board.power_mode is None:
            found.append("the power mode is unknown, because /var/lib/nvpmodel/status cannot be read")
        if self.board and not self.throttling_events:
            found.append("throttling is unknown, because no alarm of the board can be read")
        return found

    def changes(self, later: BoardState) -> list[str]:
        """Return the reasons not to publish measurements between this state and a later one."""
        found = [
            f"throttled: the alarm {name} rose from {self.throttling_events.get(name, 0):.0f} to {count:.0f}"
            for name, count in later.throttling_events.items()
            if count > self.throttling_events.get(name, 0)
        ]
        before, after = (state.board.power_mode if state.board else None for state in (self, later))
        if before != after:
            found.append(f"the power mode changed from {before or 'unknown'} to {after or 'unknown'}")
        found += [
            f"the clock limit {name} changed from {_megahertz(self, name)} to {_megahertz(later, name)}"
            for name in sorted(self.limits_hertz.keys() | later.limits_hertz.keys())
            if self.limits_hertz.get(name) != later.limits_hertz.get(name)
        ]
        if self.processors != later.processors:
            found.append(f"the processors online changed from {self.processors} to {later.processors}")
        return found


class Range(msgspec.Struct, frozen=True):
    """Lowest and highest observed value."""

    low: float
    high: float


class BoardWatch:
    """Reads the board's power ten times a second and its state every second; a context manager.

    Args:
        root: the root of the file system, another one in tests.

    Attributes:
        measures_power: whether the board has rails.
        before: the state when the watch began.
        after: the latest state.
        observed: ranges of clocks, temperatures, power and memory, by kind and name.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._sensors = Sensors(root)
        self._rails = board_rails(root)
        self.measures_power = bool(self._rails)
        self._power: list[tuple[float, float]] = []
        self.observed: dict[str, dict[str, Range]] = {}
        self._doubts: dict[str, str] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="board", daemon=True)
        self.before = self.after = BoardState.read(self._sensors, root)

    def __enter__(self) -> BoardWatch:
        self._sample(self.before)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._sample(BoardState.read(self._sensors, self._root))

    @property
    def doubts(self) -> tuple[str, ...]:
        """Reasons not to publish the measurements so far."""
        return tuple(self._doubts.values())

    def watts(self, begin: float, end: float) -> float | None:
        """Return the mean power of the board between two times of ``time.monotonic()``; None if unknown."""
        samples = [watts for at, watts in list(self._power) if begin <= at <= end]
        return sum(samples) / len(samples) if len(samples) >= _LEAST_SAMPLES else None

    def _watch(self) -> None:
        next_state = time.monotonic() + _STATE_SECONDS
        while not self._done.wait(_POWER_SECONDS):
            powers = [power for rail in self._rails if (power := rail.read()) is not None]
            if powers and len(powers) == len(self._rails):
                self._power.append((time.monotonic(), sum(powers)))
            if time.monotonic() >= next_state:
                next_state = time.monotonic() + _STATE_SECONDS
                self._sample(BoardState.read(self._sensors, self._root))

    def _sample(self, state: BoardState) -> None:
        self.after = state
        for kind in ("frequencies_hertz", "temperatures_celsius", "power_watts", "memory_bytes"):
            ranges = self.observed.setdefault(kind, {})
            for name, value in getattr(state, kind).items():
                seen = ranges.get(name, Range(value, value))
                ranges[name] = Range(min(seen.low, value), max(seen.high, value))
        for doubt in [*state.doubts(), *self.before.changes(state)]:
            # An alarm keeps rising: replace its earlier doubt.
            subject = f"{doubt.split(' rose ')[0]} rose " if ": the alarm " in doubt else doubt
            self._doubts[subject] = doubt


def _megahertz(state: BoardState, name: str) -> str:
    hertz = state.limits_hertz.get(name)
    return "unknown" if hertz is None else f"{hertz / 1e6:.0f} MHz"
