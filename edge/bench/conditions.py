"""The device of a measurement, and the board's state meanwhile: power mode, clock limits, throttling, power.

A measurement is steady if the board had one power mode and the same clock limits throughout, and did not throttle.
"""

from __future__ import annotations

import platform
import re
import threading
import time
from pathlib import Path

import msgspec

from edge.errors import Raw, UsageError
from edge.instruments.board import BoardInfo, read_board
from edge.instruments.energy import board_rails
from edge.instruments.memory import MemorySampler
from edge.instruments.sensors import Sensors, entries, read_text, whole

_STATE_SECONDS = 1.0
_POWER_SECONDS = 0.1
#: Least number of power samples for the mean of a series.
_LEAST_SAMPLES = 3
_ROOT = Path("/")


def cpu_name(root: Path = _ROOT) -> str:
    """Return the name of the processor, or its architecture if the kernel reports no name."""
    return _field(root / "proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def device_name(processor: str, root: Path = _ROOT) -> str:
    """Return the name of the board, or on another machine of its ``processor``, ``CPU`` or ``GPU``."""
    board, gpus = read_board(root), sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    names = (_field(path, "Model") for path in gpus if processor == "GPU")
    return (board and board.model) or next(filter(None, names), "") or cpu_name(root)


def _field(path: Path, name: str) -> str:
    match = re.search(rf"^{name}\s*:\s*(.+)$", read_text(path, 2**20), re.MULTILINE)
    return match[1].strip() if match else ""


def power_mode(root: Path = _ROOT) -> str:
    """Return the name of the power mode, such as ``25W``; empty on a machine that is not a Jetson.

    Raises:
        UsageError: a Jetson hides it, which could mix timings of two modes.
    """
    board = read_board(root)
    if board and not board.power_mode:
        fix = "Mount /etc/nvpmodel.conf, /etc/nvpmodel and /var/lib/nvpmodel read-only, or set one with nvpmodel."
        raise UsageError("power mode", given=Raw("unknown"), expected="the power mode of the board", fix=fix)
    return (board and board.power_mode) or ""


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

    board: BoardInfo | None = None
    processors: str | None = None
    limits_hertz: dict[str, float] = {}
    frequencies_hertz: dict[str, float] = {}
    temperatures_celsius: dict[str, float] = {}
    power_watts: dict[str, float] = {}
    throttling_events: dict[str, float] = {}
    throttling_levels: dict[str, float] = {}
    memory_bytes: dict[str, float] = {}

    @classmethod
    def read(cls, root: Path = _ROOT, sensors: Sensors | None = None) -> BoardState:
        """Read everything below the root of a file system."""
        values: dict[tuple[str, str], dict[str, float]] = {}
        for reading in (sensors or Sensors(root)).sample():
            values.setdefault((reading.kind, reading.unit), {})[reading.name] = reading.value
        processor_limits = {
            f"cpu{policy.name.removeprefix('policy')}-{bound}": kilohertz * 1e3
            for policy in entries(root / "sys/devices/system/cpu/cpufreq", "policy")
            for bound in ("min", "max")
            if (kilohertz := whole(read_text(policy / f"scaling_{bound}_freq"))) is not None
        }
        return cls(
            board=read_board(root),
            processors=read_text(root / "sys/devices/system/cpu/online") or None,
            limits_hertz=values.get(("frequency_limit", "hertz"), {}) | processor_limits,
            frequencies_hertz=values.get(("frequency", "hertz"), {}),
            temperatures_celsius=values.get(("temperature", "celsius"), {}),
            power_watts=values.get(("power", "watts"), {}),
            throttling_events=values.get(("throttling", "events"), {}),
            throttling_levels=values.get(("throttling", "level"), {}),
            memory_bytes={
                sample.kind: sample.size_bytes
                for sample in MemorySampler(root).sample()
                if sample.kind.startswith(("system_", "device_"))
            },
        )

    def throttling(self, before: BoardState) -> list[str]:
        """Return the signs of throttling from an earlier state to this one."""
        active = {name for state in (before, self) for name, level in state.throttling_levels.items() if level}
        return [f"throttled: {name} was on" for name in sorted(active)] + [
            f"throttled: the alarm {name} rose from {before.throttling_events.get(name, 0):.0f} to {count:.0f}"
            for name, count in self.throttling_events.items()
            if count > before.throttling_events.get(name, 0)
        ]

    def doubts(self, before: BoardState) -> list[str]:
        """Return the reasons not to publish measurements between an earlier state and this one."""
        doubts = self.throttling(before)
        if self.board and self.board.power_mode is None:
            doubts.append("the power mode is unknown, because /var/lib/nvpmodel/status cannot be read")
        if self.board and not self.throttling_events:
            doubts.append("throttling is unknown, because no alarm of the board can be read")
        old, new = (state.board.power_mode if state.board else None for state in (before, self))
        if old != new:
            doubts.append(f"the power mode changed from {old or 'unknown'} to {new or 'unknown'}")
        for name in sorted(before.limits_hertz.keys() | self.limits_hertz.keys()):
            low, high = (state.limits_hertz.get(name) for state in (before, self))
            if low != high:
                doubts.append(f"the clock limit {name} changed from {_megahertz(low)} to {_megahertz(high)}")
        if before.processors != self.processors:
            doubts.append(f"the processors online changed from {before.processors} to {self.processors}")
        return doubts


def _megahertz(hertz: float | None) -> str:
    return "unknown" if hertz is None else f"{hertz / 1e6:.0f} MHz"


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

    def __init__(self, root: Path = _ROOT) -> None:
        self._root, self._sensors, self._rails = root, Sensors(root), board_rails(root)
        self.measures_power = bool(self._rails)
        self._power: list[tuple[float, float]] = []
        self.observed: dict[str, dict[str, Range]] = {}
        self._doubts: dict[str, str] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="board", daemon=True)
        self.before = self.after = BoardState.read(root, self._sensors)

    def __enter__(self) -> BoardWatch:
        self._add(self.before)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._add(BoardState.read(self._root, self._sensors))

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
                self._add(BoardState.read(self._root, self._sensors))

    def _add(self, state: BoardState) -> None:
        self.after = state
        for kind in ("frequencies_hertz", "temperatures_celsius", "power_watts", "memory_bytes"):
            ranges = self.observed.setdefault(kind, {})
            for name, value in getattr(state, kind).items():
                seen = ranges.get(name, Range(value, value))
                ranges[name] = Range(min(seen.low, value), max(seen.high, value))
        for doubt in state.doubts(self.before):
            self._doubts[doubt.partition(" from ")[0]] = doubt  # an alarm that goes on rising has one doubt
