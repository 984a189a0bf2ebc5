"""Sensors of the board: temperature, power, load, clocks and throttling, each reading with its source."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from edge.instruments.kernel_files import whole
from edge.instruments.sensor_files import find_sensors

#: Drivers may come late at a boot, so sensors are looked for again.
_SEARCH_SECONDS = 60.0
_STAT = "proc/stat"
#: Columns of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal. Guests are part of user.
_COLUMNS = 8
_IDLE = (3, 4)


class SensorReading(msgspec.Struct, frozen=True):
    """One number: what kind of sensor, which one, its value and unit, and where it was read."""

    kind: str
    name: str
    value: float
    unit: str
    source: str


class Sensors:
    """Reads the sensors of a board from sysfs and procfs; a reading that cannot be had is absent, never zero.

    Args:
        root: the root of the file system, another one in tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._processors = ProcessorTime(root)
        self._sensors = find_sensors(root)
        self._search_at = time.monotonic() + _SEARCH_SECONDS

    def note(self) -> None:
        """Look at what shows only over time, the load of the processors: about once a second."""
        self._processors.note()

    def sample(self) -> tuple[SensorReading, ...]:
        """Read everything there is; a few milliseconds where power is measured over I2C, so not on the event loop."""
        now = time.monotonic()
        if now >= self._search_at:
            self._search_at = now + _SEARCH_SECONDS
            self._sensors = find_sensors(self._root)
        readings = []
        for sensor in self._sensors:
            value = sensor.read()
            if value is not None:
                readings.append(SensorReading(sensor.kind, sensor.name, value, sensor.unit, sensor.source))
        load = self._processors.utilization
        if load is not None:
            readings.append(SensorReading("utilization", "cpu", load, "ratio", f"/{_STAT}"))
        return tuple(readings)


class ProcessorTime:
    """How busy the machine's processors were, all of them together, whoever used them.

    Args:
        root: the root of the file system.

    Attributes:
        utilization: between the last two calls of :meth:`note`, 0 to 1; None where it is unknown.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / _STAT
        self._seen: tuple[int, int] | None = None
        self.utilization: float | None = None

    def note(self) -> None:
        """Look at the clock of the processors."""
        seen, before = self._times(), self._seen
        self._seen = seen
        self.utilization = None
        if seen and before:
            busy, total = seen[0] - before[0], seen[1] - before[1]
            if 0 <= busy <= total > 0:
                self.utilization = busy / total

    def _times(self) -> tuple[int, int] | None:
        """Return the time that was used and all of it, in the kernel's ticks."""
        try:
            with self._path.open("rb") as file:
                name, *words = file.readline(256).decode(errors="replace").split() or [""]
        except OSError:
            return None
        ticks = [whole(word) for word in words[:_COLUMNS]]
        if name != "cpu" or len(ticks) < _COLUMNS:
            return None
        known = [tick for tick in ticks if tick is not None and tick >= 0]
        if len(known) < _COLUMNS:
            return None
        total = sum(known)
        return total - sum(known[column] for column in _IDLE), total
