"""Files of sysfs with a board's sensors: temperature, power, load, clocks, fan and throttling.

For an Orin under JetPack 5, 6 and 7, after published listings of their trees. Numbers of zones and chips change from
one boot to the next, so everything is found by the name that the kernel gives it. No daemon is needed, and root only
for the clock and the load of the memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from edge.instruments.kernel_files import entries, read_name, read_text, whole

#: The GPU's name in the device tree where it does not say ``gpu``: Xavier, TX2, Orin under JetPack 5, Thor.
_GPU_CHIPS = ("gv11b", "gp10b", "ga10b", "gb10b")
#: Where the GPU's load is if devfreq does not lead there.
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

#: What a reading can be; anything else is the sign of a sensor that is off, such as -256 °C.
_PLAUSIBLE = {
    "temperature": (-60.0, 200.0),
    "power": (-1e3, 1e3),
    "utilization": (0.0, 1.0),
    "frequency": (0.0, 1e11),
    "frequency_limit": (1.0, 1e11),
    "fan": (0.0, 1e5),
    "throttling": (0.0, 2.0**64),
}


class SensorFile(NamedTuple):
    """A sensor, and how it is read: the product of the whole numbers of its files, in its unit.

    Attributes:
        kind: ``temperature``, ``power``, ``utilization``, ``frequency``, ``frequency_limit``, ``fan`` or
            ``throttling``.
        name: which one, in the kernel's words.
        unit: ``celsius``, ``watts``, ``ratio``, ``hertz``, ``rpm``, ``events``, or ``level``, of which 0 is none.
        scale: the unit of the product.
        paths: the files.
        source: the same for people, once it is known below which root they are.
        divisor: a file whose number divides the product.
    """

    kind: str
    name: str
    unit: str
    scale: float
    paths: tuple[Path, ...]
    source: str = ""
    divisor: Path | None = None

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
        if self.divisor:
            number = whole(read_text(self.divisor))
            if not number:
                return None
            value /= number
        return value if least <= value <= most else None


def find_sensors(root: Path) -> list[SensorFile]:
    """Return the sensors below the root of a file system; no two of a kind have the same name."""
    found: dict[tuple[str, str], SensorFile] = {}
    for search in (_temperatures, _rails, _gpus, _processors, _external_memory, _fans, _throttling):
        for sensor in search(root):
            name, count = sensor.name, 1
            while (sensor.kind, name) in found:
                count += 1
                name = f"{sensor.name}-{count}"
            first, *others = sensor.paths
            source = " ".join([f"/{first.relative_to(root)}", *(path.name for path in others)])
            if sensor.divisor:
                source += f" / {sensor.divisor.relative_to(root)}"
            found[sensor.kind, name] = sensor._replace(name=name, source=source)
    return list(found.values())


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
        # A container has the second name alone.
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
    # On an Orin: 1 is too low a voltage, 2 too high a current on average, 3 at a moment.
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
