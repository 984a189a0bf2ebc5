"""A board's sensors in sysfs and procfs: temperature, power, load, clocks, fan and throttling.

For an Orin under JetPack 5, 6 and 7, after published listings of their trees. Numbers of zones and chips change from
one boot to the next, so everything is found by the name that the kernel gives it. No daemon is needed, and root only
for the clock and the load of the memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import msgspec

_LONGEST = 64
#: Drivers may be loaded late at boot, so the search for sensors is repeated.
_SEARCH_SECONDS = 60.0
_STAT = "proc/stat"
#: Columns of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal. Guests are part of user.
_COLUMNS = 8
_IDLE = (3, 4)
#: The GPU's names in the device tree where they lack ``gpu``: Xavier, TX2, Orin under JetPack 5, Thor.
_GPU_CHIPS = ("gv11b", "gp10b", "ga10b", "gb10b")
#: The GPU's load where devfreq has no link to it.
_GPU_LOADS = ("sys/devices/platform/gpu.0/load", "sys/devices/gpu.0/load")
_EMC_RATE = "sys/kernel/debug/bpmp/debug/clk/emc/rate"
#: Per cent of the memory's bandwidth in use, times its clock in kHz.
_EMC_ACTIVITIES = (
    "sys/kernel/debug/cactmon/mc_all",
    "sys/kernel/debug/bpmp/debug/actmon/mc_all_avg_activity",
    "sys/kernel/actmon_avg_activity/mc_all",
)
#: The limit of nvpmodel on the memory's clock, in Hz; 0 is no limit.
_EMC_LIMITS = ("sys/kernel/nvpmodel_clk_cap/emc", "sys/kernel/nvpmodel_emc_cap/emc_iso_cap")
#: An INA3221 has three channels; what its driver lists beyond them are shunt voltages and their sum.
_RAILS = (1, 2, 3)
_OVER_CURRENTS = (1, 2, 3)

#: Plausible values. Others come from sensors that are off, such as -256 °C.
_PLAUSIBLE = {
    "temperature": (-60.0, 200.0),
    "power": (-1e3, 1e3),
    "utilization": (0.0, 1.0),
    "frequency": (0.0, 1e11),
    "frequency_limit": (1.0, 1e11),
    "fan": (0.0, 1e5),
    "throttling": (0.0, 2.0**64),
}


def read_text(path: Path, longest: int = _LONGEST) -> str:
    """Return the stripped text of a small file; empty if it cannot be read or is longer.

    Python's files raise a TypeError where a sensor that is off returns EAGAIN; this function does not.
    """
    data = b""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while len(data) <= longest and (part := os.read(file, longest + 1 - len(data))):
                data += part
        finally:
            os.close(file)
    except OSError:
        return ""
    return data.decode(errors="replace").strip("\0 \t\r\n") if len(data) <= longest else ""


def read_name(path: Path, longest: int = _LONGEST) -> str:
    """Return the name in a file; empty if it is not printable."""
    name = read_text(path, longest)
    return name if name.isprintable() else ""


def whole(text: str) -> int | None:
    """Return a decimal number as the kernel writes it; None for anything else, such as ``N/A``."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() else None


def entries(directory: Path, prefix: str = "") -> list[Path]:
    """Return the entries of a directory whose names have a prefix, in the order of their numbers."""
    try:
        names = [name for name in os.listdir(directory) if name.startswith(prefix)]
    except OSError:
        return []
    return [directory / name for name in sorted(names, key=lambda name: (len(name), name))]


class SensorReading(msgspec.Struct, frozen=True):
    """The value of one sensor, and the files that it was read from."""

    kind: str
    name: str
    value: float
    unit: str
    source: str


class Sensors:
    """Reads the sensors of a board; a sensor that cannot be read is absent, never zero."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._sensors = find_sensors(root)
        self._search_at = time.monotonic() + _SEARCH_SECONDS
        self._processor_ticks: tuple[int, int] | None = None
        self._processor_load: float | None = None

    def observe(self) -> None:
        """Update the load of the processors since the last call; to be called about once a second."""
        before, now = self._processor_ticks, _processor_ticks(self._root / _STAT)
        self._processor_ticks, self._processor_load = now, None
        if now and before:
            busy, total = now[0] - before[0], now[1] - before[1]
            if 0 <= busy <= total > 0:
                self._processor_load = busy / total

    def sample(self) -> tuple[SensorReading, ...]:
        """Read all sensors. It takes milliseconds where power is measured over I2C, too long for the event loop."""
        now = time.monotonic()
        if now >= self._search_at:
            self._search_at = now + _SEARCH_SECONDS
            self._sensors = find_sensors(self._root)
        readings = [
            SensorReading(sensor.kind, sensor.name, value, sensor.unit, sensor.source)
            for sensor in self._sensors
            if (value := sensor.read()) is not None
        ]
        if self._processor_load is not None:
            readings.append(SensorReading("utilization", "cpu", self._processor_load, "ratio", f"/{_STAT}"))
        return tuple(readings)


def _processor_ticks(stat: Path) -> tuple[int, int] | None:
    """Return the busy and the total ticks of all processors; None where they cannot be read."""
    try:
        with stat.open("rb") as file:
            name, *words = file.readline(256).decode(errors="replace").split() or [""]
    except OSError:
        return None
    ticks = [tick for word in words[:_COLUMNS] if (tick := whole(word)) is not None and tick >= 0]
    if name != "cpu" or len(ticks) < _COLUMNS:
        return None
    total = sum(ticks)
    return total - sum(ticks[column] for column in _IDLE), total


class SensorFile(NamedTuple):
    """A sensor whose value is the product of the whole numbers in its files."""

    kind: str  # a key of _PLAUSIBLE
    name: str  # the kernel's
    unit: str  # celsius, watts, ratio, hertz, rpm, events or level, where 0 means none
    scale: float  # the factor from the product to the unit
    paths: tuple[Path, ...]
    source: str = ""  # the files for people, relative to the root
    divisor: Path | None = None  # a file whose number divides the product

    def read(self) -> float | None:
        """Return the value; None where it cannot be read or is not plausible."""
        numbers = [number for path in self.paths if (number := whole(read_text(path))) is not None]
        divisor = whole(read_text(self.divisor)) if self.divisor else 1
        if len(numbers) < len(self.paths) or not divisor:
            return None
        value = prod(numbers) * self.scale / divisor
        least, most = _PLAUSIBLE[self.kind]
        return value if least <= value <= most else None


def find_sensors(root: Path) -> list[SensorFile]:
    """Return the sensors of a file system; names are unique within a kind."""
    sensors: dict[tuple[str, str], SensorFile] = {}
    for search in (_temperatures, _rails, _gpus, _processors, _external_memory, _fans, _throttling):
        for sensor in search(root):
            name, count = sensor.name, 1
            while (sensor.kind, name) in sensors:
                count += 1
                name = f"{sensor.name}-{count}"
            first, *others = sensor.paths
            source = " ".join([f"/{first.relative_to(root)}", *(path.name for path in others)])
            if sensor.divisor:
                source += f" / {sensor.divisor.relative_to(root)}"
            sensors[sensor.kind, name] = sensor._replace(name=name, source=source)
    return list(sensors.values())


def _temperatures(root: Path) -> Iterator[SensorFile]:
    for zone in entries(root / "sys/class/thermal", "thermal_zone"):
        name = read_name(zone / "type")
        if name:
            yield SensorFile("temperature", name, "celsius", 1e-3, (zone / "temp",))


def _rails(root: Path) -> Iterator[SensorFile]:
    for chip in _chips(root, "ina3221"):
        for channel in _RAILS:
            name = read_name(chip / f"in{channel}_label")
            if name and name != "NC":  # not connected
                paths = (chip / f"in{channel}_input", chip / f"curr{channel}_input")  # mV and mA
                yield SensorFile("power", name, "watts", 1e-6, paths)


def gpu_devices(root: Path) -> Iterator[Path]:
    """Yield the GPU's directories of devfreq, which hold its clocks."""
    for device in entries(root / "sys/class/devfreq"):
        # In a container only the second name can be read.
        names = read_name(device / "device/of_node/name"), device.name.rpartition(".")[2]
        if any(name in _GPU_CHIPS or "gpu" in name for name in names):
            yield device


def _gpus(root: Path) -> Iterator[SensorFile]:
    loads = []
    for device in gpu_devices(root):
        loads.append(device / "device/load")
        yield SensorFile("frequency", "gpu", "hertz", 1.0, (device / "cur_freq",))
        for bound in ("min", "max"):
            yield SensorFile("frequency_limit", f"gpu-{bound}", "hertz", 1.0, (device / f"{bound}_freq",))
    loads += [root / load for load in _GPU_LOADS]
    load = next((load for load in loads if load.is_file()), None)
    if load:
        yield SensorFile("utilization", "gpu", "ratio", 1e-3, (load,))


def _processors(root: Path) -> Iterator[SensorFile]:
    # Processors of one policy have one clock.
    for policy in entries(root / "sys/devices/system/cpu/cpufreq", "policy"):
        name = f"cpu{policy.name.removeprefix('policy')}"
        yield SensorFile("frequency", name, "hertz", 1e3, (policy / "scaling_cur_freq",))


def _external_memory(root: Path) -> Iterator[SensorFile]:
    rate = root / _EMC_RATE
    if os.access(rate, os.R_OK):
        yield SensorFile("frequency", "emc", "hertz", 1.0, (rate,))
        activity = next((root / path for path in _EMC_ACTIVITIES if os.access(root / path, os.R_OK)), None)
        if activity:  # per cent times kHz, by Hz
            yield SensorFile("utilization", "emc", "ratio", 10.0, (activity,), divisor=rate)
    limit = next((root / path for path in _EMC_LIMITS if os.access(root / path, os.R_OK)), None)
    if limit:
        yield SensorFile("frequency_limit", "emc-max", "hertz", 1.0, (limit,))


def _fans(root: Path) -> Iterator[SensorFile]:
    for chip in _chips(root, "pwmfan"):
        yield SensorFile("fan", "pwmfan", "ratio", 1 / 255, (chip / "pwm1",))
    for chip in _chips(root, "pwm_tach"):
        yield SensorFile("fan", "pwm_tach", "rpm", 1.0, (chip / "rpm",))


def _throttling(root: Path) -> Iterator[SensorFile]:
    # On an Orin, 1 means too low a voltage, 2 too high an average current, 3 too high a peak current.
    for chip in _chips(root, "soctherm_oc"):
        for alarm in _OVER_CURRENTS:
            path = chip / f"oc{alarm}_event_cnt"
            if path.is_file():
                yield SensorFile("throttling", f"oc{alarm}", "events", 1.0, (path,))
    for device in entries(root / "sys/class/thermal", "cooling_device"):
        name = read_name(device / "type")
        if name.endswith("-alert"):
            yield SensorFile("throttling", name, "level", 1.0, (device / "cur_state",))


def _chips(root: Path, name: str) -> Iterator[Path]:
    return (chip for chip in entries(root / "sys/class/hwmon", "hwmon") if read_text(chip / "name") == name)
