"""Files of sysfs with a board's sensors: temperature, power, load, clocks and throttling.

For an Orin under JetPack 5, 6 and 7, after published listings of their trees. Numbers of zones and chips change from
one boot to the next, so everything is found by the name that the kernel gives it. No daemon and no root is
needed but for the clock of the memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LONGEST = 64
#: The GPU's name in the device tree where it does not say ``gpu``: Xavier, TX2, Orin under JetPack 5, Thor.
_GPU_CHIPS = ("gv11b", "gp10b", "ga10b", "gb10b")
#: Where the GPU's load is if devfreq does not lead there.
_GPU_LOADS = ("sys/devices/platform/gpu.0/load", "sys/devices/gpu.0/load")
_EMC_RATE = "sys/kernel/debug/bpmp/debug/clk/emc/rate"
#: An INA3221 has three channels; what its driver lists beyond them are shunt voltages and their sum.
_RAILS = (1, 2, 3)
_OVER_CURRENTS = (1, 2, 3)

#: What a reading can be; anything else is the sign of a sensor that is off, such as -256 °C.
_PLAUSIBLE = {
    "temperature": (-60.0, 200.0),
    "power": (-1e3, 1e3),
    "utilization": (0.0, 1.0),
    "frequency": (0.0, 1e11),
    "throttling": (0.0, 2.0**64),
}


class SensorFile(NamedTuple):
    """A sensor, and how it is read: the product of the whole numbers of its files, in its unit.

    Attributes:
        kind: ``temperature``, ``power``, ``utilization``, ``frequency`` or ``throttling``.
        name: which one, in the kernel's words.
        unit: ``celsius``, ``watts``, ``ratio``, ``hertz``, ``events``, or ``level``, of which 0 is none.
        scale: the unit of the product.
        paths: the files.
        source: the same for people, once it is known below which root they are.
    """

    kind: str
    name: str
    unit: str
    scale: float
    paths: tuple[Path, ...]
    source: str = ""

    def read(self) -> float | None:
        """Return the value now; None where it cannot be read or cannot be true."""
        product = 1
        for path in self.paths:
            number = whole(read_text(path))
            if number is None:
                return None
            product *= number
        least, most = _PLAUSIBLE[self.kind]
        value = product * self.scale
        return value if least <= value <= most else None


def find_sensors(root: Path) -> list[SensorFile]:
    """Return the sensors below the root of a file system; no two of a kind have the same name."""
    found: dict[tuple[str, str], SensorFile] = {}
    for search in (_temperatures, _rails, _gpus, _processors, _throttling):
        for sensor in search(root):
            name, count = sensor.name, 1
            while (sensor.kind, name) in found:
                count += 1
                name = f"{sensor.name}-{count}"
            first, *others = sensor.paths
            source = " ".join([f"/{first.relative_to(root)}", *(path.name for path in others)])
            found[sensor.kind, name] = sensor._replace(name=name, source=source)
    return list(found.values())


def read_text(path: Path) -> str:
    """Return what a small file says, without blanks and NULs around it; nothing if it cannot be read.

    Python's own files fail with a TypeError where a sensor that is off answers EAGAIN; this does not.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            data = os.read(file, _LONGEST + 1)
        finally:
            os.close(file)
    except OSError:
        return ""
    return data.decode(errors="replace").strip("\0 \t\r\n") if len(data) <= _LONGEST else ""


def whole(text: str) -> int | None:
    """Return a decimal number as the kernel writes it; None for anything else, such as ``N/A``."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() else None


def _temperatures(root: Path) -> Iterator[SensorFile]:
    for zone in _entries(root / "sys/class/thermal", "thermal_zone"):
        name = _name(zone / "type")
        if name:
            yield SensorFile("temperature", name, "celsius", 1e-3, (zone / "temp",))


def _rails(root: Path) -> Iterator[SensorFile]:
    for chip in _chips(root, "ina3221"):
        for channel in _RAILS:
            name = _name(chip / f"in{channel}_label")
            if name and name != "NC":  # not connected
                paths = (chip / f"in{channel}_input", chip / f"curr{channel}_input")  # mV and mA
                yield SensorFile("power", name, "watts", 1e-6, paths)


def _gpus(root: Path) -> Iterator[SensorFile]:
    loads = []
    for device in _entries(root / "sys/class/devfreq"):
        chip = _name(device / "device/of_node/name")
        if chip in _GPU_CHIPS or "gpu" in chip or "gpu" in device.name:
            loads.append(device / "device/load")
            yield SensorFile("frequency", "gpu", "hertz", 1.0, (device / "cur_freq",))
    loads += [root / load for load in _GPU_LOADS]
    load = next((load for load in loads if load.is_file()), None)
    if load:
        yield SensorFile("utilization", "gpu", "ratio", 1e-3, (load,))


def _processors(root: Path) -> Iterator[SensorFile]:
    # Processors of one policy have one clock.
    for policy in _entries(root / "sys/devices/system/cpu/cpufreq", "policy"):
        name = f"cpu{policy.name.removeprefix('policy')}"
        yield SensorFile("frequency", name, "hertz", 1e3, (policy / "scaling_cur_freq",))
    emc = root / _EMC_RATE
    if os.access(emc, os.R_OK):
        yield SensorFile("frequency", "emc", "hertz", 1.0, (emc,))


def _throttling(root: Path) -> Iterator[SensorFile]:
    # On an Orin: 1 is too low a voltage, 2 too high a current on average, 3 at a moment.
    for chip in _chips(root, "soctherm_oc"):
        for alarm in _OVER_CURRENTS:
            path = chip / f"oc{alarm}_event_cnt"
            if path.is_file():
                yield SensorFile("throttling", f"oc{alarm}", "events", 1.0, (path,))
    for device in _entries(root / "sys/class/thermal", "cooling_device"):
        name = _name(device / "type")
        if name.endswith("-alert"):
            yield SensorFile("throttling", name, "level", 1.0, (device / "cur_state",))


def _chips(root: Path, name: str) -> Iterator[Path]:
    return (chip for chip in _entries(root / "sys/class/hwmon", "hwmon") if read_text(chip / "name") == name)


def _entries(directory: Path, prefix: str = "") -> list[Path]:
    """Return the entries of a directory whose names begin so, by their number where they have one."""
    try:
        names = [name for name in os.listdir(directory) if name.startswith(prefix)]
    except OSError:
        return []
    return [directory / name for name in sorted(names, key=lambda name: (len(name), name))]


def _name(path: Path) -> str:
    """Return a name that a file holds; nothing if it is none that can be shown."""
    name = read_text(path)
    return name if name.isprintable() else ""
