"""File systems of boards: the Jetson Orin Nano as the kernels of JetPack 5, 6 and 7 show it, links included."""

from __future__ import annotations

from pathlib import Path

TEMPERATURES = {
    "cpu": 43531,
    "gpu": 45750,
    "cv0": 46467,
    "cv1": 48235,
    "cv2": 47732,
    "soc0": 49562,
    "soc1": 49031,
    "soc2": 48343,
    "tj": 50937,
}
#: Rail to millivolts and milliamperes.
RAILS = {"VDD_IN": (5072, 1312), "VDD_CPU_GPU_CV": (5064, 192), "VDD_SOC": (5064, 272)}
STAT = "cpu  26716126 25174 7198445 948399047 900582 0 354519 0 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\nintr 1 2 3\n"
#: A second later: 1 of 4 ticks was used.
STAT_LATER = "cpu  26716226 25174 7198445 948399347 900582 0 354519 0 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\nintr 1 2 3\n"
MEMINFO = "MemTotal:        7665664 kB\nMemAvailable:    4200000 kB\nNvMapMemUsed:     524688 kB\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def orin_nano(root: Path, jetpack: int) -> Path:
    """Write the tree of an Orin Nano; the names, places and numbers are those of its JetPack."""
    bus = "sys/devices" if jetpack == 5 else "sys/devices/platform/bus@0"
    gpu = "17000000.ga10b" if jetpack == 5 else "17000000.gpu"
    rails, alarms, fan = {5: (3, 1, 2), 6: (1, 3, 0), 7: (4, 2, 0)}[jetpack]
    _gpu(root, bus, gpu, "ga10b" if jetpack == 5 else "gpu")
    _zones(root, backwards=jetpack == 7, suffix="-therm" if jetpack == 5 else "-thermal")
    chip = f"{bus}/c240000.i2c/i2c-1/1-0040/hwmon/hwmon{rails}"
    _ina3221(root, chip)
    link(root / f"sys/class/hwmon/hwmon{rails}", f"../../../{chip}")
    alarm = f"sys/devices/platform/soctherm-oc-event/hwmon/hwmon{alarms}"
    write(root, {f"{alarm}/name": "soctherm_oc\n"})
    write(root, {f"{alarm}/oc{number}_event_cnt": f"{count}\n" for number, count in ((1, 0), (2, 15), (3, 37))})
    write(root, {f"{alarm}/oc{number}_throt_en": "1\n" for number in (1, 2, 3)})
    link(root / f"sys/class/hwmon/hwmon{alarms}", f"../../../{alarm}")
    write(root, {f"sys/class/hwmon/hwmon{fan}/name": "pwmfan\n", f"sys/class/hwmon/hwmon{fan}/pwm1": "60\n"})
    _processors(root)
    return write(root, {"proc/stat": STAT, "proc/meminfo": MEMINFO})


def _gpu(root: Path, bus: str, name: str, node: str) -> None:
    device = f"{bus}/{name}"
    devfreq = f"{device}/devfreq/{name}"
    clocks = {"cur_freq": "306000000\n", "min_freq": "306000000\n", "max_freq": "1020000000\n"}
    write(root, {f"{devfreq}/{file}": text for file, text in clocks.items()})
    write(root, {f"{devfreq}/governor": "nvhost_podgov\n", f"{device}/load": "842\n"})
    write(root, {f"sys/firmware/devicetree/base/{name}/name": f"{node}\0"})
    link(root / device / "of_node", f"{'../' * (device.count('/'))}firmware/devicetree/base/{name}")
    link(root / devfreq / "device", "../../../" + name)
    link(root / f"sys/class/devfreq/{name}", f"../../../{devfreq}")
    # Other engines have a clock too.
    for engine in ("15340000.vic", "15480000.nvdec"):
        write(root, {f"sys/class/devfreq/{engine}/cur_freq": "115200000\n"})


def _zones(root: Path, *, backwards: bool, suffix: str) -> None:
    zones = list(TEMPERATURES.items())
    for number, (name, millidegrees) in enumerate(reversed(zones) if backwards else zones):
        zone = f"sys/devices/virtual/thermal/thermal_zone{number}"
        write(root, {f"{zone}/type": f"{name}{suffix}\n", f"{zone}/temp": f"{millidegrees}\n"})
        link(root / f"sys/class/thermal/thermal_zone{number}", f"../../devices/virtual/thermal/thermal_zone{number}")
    devices = {"pwm-fan": 1, "cpufreq-cpu0": 5, "cpu-throttle-alert": 0, "gpu-throttle-alert": 1}
    for number, (name, state) in enumerate(devices.items()):
        device = f"sys/class/thermal/cooling_device{number}"
        write(root, {f"{device}/type": f"{name}\n", f"{device}/cur_state": f"{state}\n"})


def _ina3221(root: Path, chip: str) -> None:
    write(
        root, {f"{chip}/name": "ina3221\n", f"{chip}/in7_label": "sum of shunt voltages\n", f"{chip}/in7_input": "9\n"}
    )
    for channel, (label, (millivolts, milliamperes)) in enumerate(RAILS.items(), 1):
        write(
            root,
            {
                f"{chip}/in{channel}_label": f"{label}\n",
                f"{chip}/in{channel}_input": f"{millivolts}\n",
                f"{chip}/curr{channel}_input": f"{milliamperes}\n",
                f"{chip}/curr{channel}_max": "7784\n",
            },
        )


def _processors(root: Path) -> None:
    for policy, kilohertz in ((0, 729600), (4, 1344000)):
        directory = f"sys/devices/system/cpu/cpufreq/policy{policy}"
        write(root, {f"{directory}/scaling_cur_freq": f"{kilohertz}\n", f"{directory}/scaling_governor": "schedutil\n"})
