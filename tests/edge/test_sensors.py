"""Memory and sensors from the files of an Orin Nano, from broken files, and from this machine."""

import os
import time

import psutil
import pytest

from edge.instruments import sensors as module
from edge.instruments.memory import MemorySampler
from edge.instruments.sensors import Sensors
from tests.support import boards
from tests.support.boards import (
    BUDDYINFO,
    RAILS,
    STAT,
    STAT_LATER,
    add_files_for_root,
    in_container,
    link,
    orin_nano,
    write,
)

Key = tuple[str, str]


def sampled(sensors):
    return {(reading.kind, reading.name): reading for reading in sensors.sample()}


def values(root):
    return {key: reading.value for key, reading in sampled(Sensors(root)).items()}


def expected(jetpack):
    suffix = "-therm" if jetpack == 5 else "-thermal"
    least, most = boards.GPU_CLOCKS[jetpack]
    kinds = {
        "temperature": {f"{name}{suffix}": value / 1000 for name, value in boards.TEMPERATURES.items()},
        "power": {rail: volts * amperes / 1e6 for rail, (volts, amperes) in RAILS.items()},
        "frequency": {"gpu": 306e6, "cpu0": 729.6e6, "cpu4": 1344e6},
        "frequency_limit": {"gpu-min": least, "gpu-max": most, "emc-max": 2133e6 if jetpack == 5 else 3199e6},
        "utilization": {"gpu": 0.842},
        "fan": {"pwmfan": 60 / 255, "pwm_tach": 1843},
        "throttling": {"oc1": 0, "oc2": 15, "oc3": 37, "cpu-throttle-alert": 0, "gpu-throttle-alert": 1},
    }
    return {(kind, name): value for kind, found in kinds.items() for name, value in found.items()}


@pytest.mark.parametrize("jetpack", [5, 6, 7])
def test_sensors_of_an_orin_nano(tmp_path, jetpack):
    root = orin_nano(tmp_path, jetpack)
    assert values(root) == pytest.approx(expected(jetpack))
    assert values(in_container(root)) == pytest.approx(expected(jetpack))


def test_units_and_sources(tmp_path):
    found = sampled(Sensors(add_files_for_root(orin_nano(tmp_path, 6))))
    units = {reading.unit for reading in found.values()}
    assert units == {"celsius", "watts", "ratio", "hertz", "rpm", "events", "level"}
    assert {key: found[key].source for key in found if key[1] in ("cpu-thermal", "VDD_IN", "gpu", "emc")} == {
        ("temperature", "cpu-thermal"): "/sys/class/thermal/thermal_zone0/temp",
        ("power", "VDD_IN"): "/sys/class/hwmon/hwmon1/in1_input curr1_input",
        ("frequency", "gpu"): "/sys/class/devfreq/17000000.gpu/cur_freq",
        ("frequency", "emc"): "/sys/kernel/debug/bpmp/debug/clk/emc/rate",
        ("utilization", "gpu"): "/sys/class/devfreq/17000000.gpu/device/load",
        ("utilization", "emc"): "/sys/kernel/debug/cactmon/mc_all / sys/kernel/debug/bpmp/debug/clk/emc/rate",
    }
    assert (found["frequency", "emc"].value, found["utilization", "emc"].value) == (2133e6, pytest.approx(0.61))


def test_implausible_values_are_absent(tmp_path):
    root = add_files_for_root(orin_nano(tmp_path, 6))
    for path, text, key, value in (
        ("sys/kernel/debug/bpmp/debug/clk/emc/rate", "0", ("utilization", "emc"), None),
        # nvpmodel writes 0 for the memory, and scripts that lift all limits write the largest number for the GPU.
        ("sys/kernel/nvpmodel_clk_cap/emc", "0", ("frequency_limit", "emc-max"), None),
        ("sys/class/devfreq/17000000.gpu/max_freq", str(2**63 - 1), ("frequency_limit", "gpu-max"), None),
        ("sys/class/devfreq/17000000.gpu/device/load", "0", ("utilization", "gpu"), 0.0),
        ("sys/class/devfreq/17000000.gpu/device/load", "1000", ("utilization", "gpu"), 1.0),
        ("sys/class/devfreq/17000000.gpu/device/load", "1001", ("utilization", "gpu"), None),
        ("sys/class/devfreq/17000000.gpu/device/load", "-1", ("utilization", "gpu"), None),
    ):
        assert values(write(root, {path: text})).get(key) == value


def test_sensors_of_a_desktop(tmp_path):
    rail = {"in1_input": "1\n", "curr1_input": "1\n"}
    for device, files in {
        "thermal/thermal_zone0": {"type": "acpitz\n", "temp": "27800\n"},
        "thermal/thermal_zone1": {"type": "acpitz\n", "temp": "29800\n"},
        "thermal/cooling_device0": {"type": "Processor\n", "cur_state": "3\n"},
        "hwmon/hwmon0": {"name": "nvme\n", "temp1_input": "38850\n"},
        "hwmon/hwmon1": {"name": "coretemp\n", "in1_label": "VDD_IN\n", **rail},
        "hwmon/hwmon2": {"name": "ina3221", "in1_label": "NC", **rail},  # not connected
        "devfreq/ddr": {"cur_freq": "1\n"},
    }.items():
        write(tmp_path / "sys/class" / device, files)
    zones = {("temperature", "acpitz"): 27.8, ("temperature", "acpitz-2"): 29.8}
    assert values(tmp_path) == zones
    for load, place in ((0.5, "sys/devices/gpu.0/load"), (0.25, "sys/devices/platform/gpu.0/load")):  # without devfreq
        write(tmp_path, {place: f"{load * 1000:.0f}\n"})
        assert values(tmp_path) == {**zones, ("utilization", "gpu"): load}


def sensor_paths(root):
    return {key: root / reading.source.split()[0].lstrip("/") for key, reading in sampled(Sensors(root)).items()}


@pytest.mark.parametrize("bad", ["", "-256000", "0x10", "1e3", "4 5", "1_000", "٣", "²", "nan", "\0", "9" * 65, "1\n2"])
def test_text_that_is_not_a_number_is_absent(tmp_path, bad):
    orin_nano(tmp_path, 6)
    for path in sensor_paths(tmp_path).values():
        path.write_text(bad)
    # Only power can be negative.
    assert set(values(tmp_path)) <= ({("power", rail) for rail in RAILS} if bad == "-256000" else set())


def test_missing_file_affects_only_its_sensor(tmp_path):
    sensors = Sensors(orin_nano(tmp_path, 6))
    left, paths = set(sampled(sensors)), sensor_paths(tmp_path)
    for key in (("temperature", "gpu-thermal"), ("power", "VDD_IN"), ("utilization", "gpu")):
        left.remove(key)
        paths[key].unlink()
        assert set(sampled(sensors)) == left
        paths[key].mkdir()
        assert set(sampled(sensors)) == left


def test_sensor_that_returns_eagain_is_absent(tmp_path):
    """The zones of the vision accelerators do so while these are off; Python's files would raise a TypeError."""
    orin_nano(tmp_path, 6)
    path = sensor_paths(tmp_path)["temperature", "cv0-thermal"]
    path.unlink()
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        found = values(tmp_path)
    finally:
        os.close(writer)
    assert ("temperature", "cv0-thermal") not in found
    assert found["temperature", "cv1-thermal"] == 48.235


def test_names_are_printable(tmp_path):
    for number, name in enumerate((b"", b"\xff\xfe", b"a\nb", b"x" * 65, b"\x1b[31mred")):
        (write(tmp_path / f"sys/class/thermal/thermal_zone{number}", {"temp": "40000\n"}) / "type").write_bytes(name)
    assert set(values(tmp_path)) == {("temperature", "\N{REPLACEMENT CHARACTER}" * 2)}


def test_zones_are_in_the_order_of_their_numbers_and_have_unique_names(tmp_path):
    for number, name in ((10, "x"), (9, "x"), (2, "x-2"), (1, "x")):
        write(tmp_path / f"sys/class/thermal/thermal_zone{number}", {"type": name, "temp": f"{number}000"})
    found = [(name, value) for (_, name), value in values(tmp_path).items()]
    assert found == [("x", 1), ("x-2", 2), ("x-3", 9), ("x-4", 10)]


def test_circular_links_are_ignored(tmp_path):
    link(tmp_path / "sys/class/devfreq/17000000.gpu", "17000000.gpu")
    link(tmp_path / "sys/class/thermal", "thermal")
    assert values(tmp_path) == {}


def test_driver_that_is_loaded_late_is_found(tmp_path, monkeypatch):
    sensors = Sensors(tmp_path)
    orin_nano(tmp_path, 6)
    assert sensors.sample() == ()
    later = time.monotonic() + module._SEARCH_SECONDS
    monkeypatch.setattr(module.time, "monotonic", lambda: later)
    assert ("utilization", "gpu") in sampled(sensors)


def test_load_of_the_processors(tmp_path):
    sensors = Sensors(orin_nano(tmp_path, 6))
    load = ("utilization", "cpu")
    assert load not in sampled(sensors)
    sensors.observe()
    assert load not in sampled(sensors)  # the average since boot is not the present load
    write(tmp_path, {"proc/stat": STAT_LATER})
    sensors.observe()
    assert [sampled(sensors)[load].value for _ in range(2)] == [0.25, 0.25]
    sensors.observe()
    assert load not in sampled(sensors)  # no tick has passed


@pytest.mark.parametrize("line", ["", "cpu 1 2 3", "cpu a b c d e f g h", "cpu " + "-9 " * 8, STAT, None])
def test_broken_or_backward_processor_times_are_absent(tmp_path, line):
    sensors = Sensors(write(tmp_path, {"proc/stat": STAT_LATER}))
    sensors.observe()
    (tmp_path / "proc/stat").unlink()
    if line is not None:
        write(tmp_path, {"proc/stat": f"{line}\n"})
    sensors.observe()
    assert sensors.sample() == ()


PROCESS = 4321
MEMINFO = """\
MemTotal:        7665664 kB
MemFree:         1024000 kB
MemAvailable:    4200000 kB
NvMapMemFree:          0 kB
NvMapMemUsed:     524688 kB
CmaTotal:         262144 kB
SwapTotal:       3901440 kB
SwapFree:        3732480 kB
HugePages_Total:       0
"""
STATUS = "Name:\tfewheads\nPid:\t4321\nVmPeak:\t  990000 kB\nVmHWM:\t  123456 kB\nVmRSS:\t  120000 kB\nThreads:\t9\n"
ROLLUP = (
    "aaaac0000000-ffffe0000000 ---p 00000000 00:00 0    [rollup]\nRss:  120000 kB\nPss:   90000 kB\nPss_Dirty: 1 kB\n"
)
CLIENTS = """\
CLIENT                        PROCESS      PID        SIZE
user                   gnome-shell     1543        220K
user                          Xorg     1234        180K
user                    vlm-server     4321     524288K
total                                           524688K
"""
FILES = {
    "proc/meminfo": MEMINFO,
    f"proc/{PROCESS}/status": STATUS,
    f"proc/{PROCESS}/smaps_rollup": ROLLUP,
    "sys/kernel/debug/nvmap/iovmm/clients": CLIENTS,
    "sys/kernel/debug/nvmap/stats/total_memory": "537280512\n",
    "proc/buddyinfo": BUDDYINFO,
}
KINDS = {"process_rss": 120000, "process_peak_rss": 123456, "process_pss": 90000, "system_available": 4200000}
KINDS |= {"system_total": 7665664, "device_used": 524688, "device_peak_used": 524688, "device_total": 7665664}
KINDS |= {"device_process": 524288, "device_allocated": 524688, "swap_total": 3901440, "swap_used": 168960}
KINDS |= {"largest_free_block": 4 * 1024, "largest_free_blocks_total": 157 * 4 * 1024}
KINDS = {kind: kilobytes * 1024 for kind, kilobytes in KINDS.items()}
MEMINFO_KINDS = {
    *("system_available", "system_total", "swap_total", "swap_used"),
    *("device_used", "device_peak_used", "device_total", "largest_free_block", "largest_free_blocks_total"),
}


def readings(root):
    return readings_of(MemorySampler(root, PROCESS))


def readings_of(sampler):
    return {reading.kind: reading.size_bytes for reading in sampler.sample()}


def test_memory_of_a_jetson(tmp_path):
    sample = MemorySampler(write(tmp_path, FILES), PROCESS).sample()
    assert sorted((reading.kind, reading.size_bytes) for reading in sample) == sorted(KINDS.items())
    sources = {reading.kind: reading.source for reading in sample}
    assert sources["device_used"] == "/proc/meminfo NvMapMemUsed"
    assert sources["device_process"] == "/sys/kernel/debug/nvmap/iovmm/clients"
    assert sources["process_pss"] == "/proc/self/smaps_rollup Pss"


def test_unreadable_file_affects_only_its_readings(tmp_path):
    for missing, absent in (
        ("proc/meminfo", MEMINFO_KINDS),
        ("proc/buddyinfo", {"largest_free_block", "largest_free_blocks_total"}),
        ("sys/kernel/debug/nvmap/stats/total_memory", {"device_allocated"}),
        (f"proc/{PROCESS}/status", {"process_rss", "process_peak_rss"}),
        (f"proc/{PROCESS}/smaps_rollup", {"process_pss"}),
        ("sys/kernel/debug/nvmap/iovmm/clients", {"device_process"}),
    ):
        write(tmp_path, FILES)
        (tmp_path / missing).unlink()
        assert set(readings(tmp_path)) == set(KINDS) - absent
        (tmp_path / missing).mkdir()
        assert set(readings(tmp_path)) == set(KINDS) - absent
        (tmp_path / missing).rmdir()


def test_empty_file_system_has_no_readings_and_a_machine_without_swap_zero_bytes(tmp_path):
    sampler = MemorySampler(tmp_path, PROCESS)
    assert (sampler.sample(), sampler.process_rss_bytes()) == ((), 0)
    write(tmp_path, {"proc/meminfo": "SwapTotal: 0 kB\nSwapFree: 0 kB\n"})
    assert readings_of(sampler) == {"swap_total": 0, "swap_used": 0}


def test_machine_without_nvmap(tmp_path):
    meminfo = "".join(line for line in MEMINFO.splitlines(keepends=True) if not line.startswith("NvMap"))
    files = {**FILES, "proc/meminfo": meminfo}
    del files["sys/kernel/debug/nvmap/iovmm/clients"], files["sys/kernel/debug/nvmap/stats/total_memory"]
    device = {kind for kind in KINDS if kind.startswith(("device_", "largest_"))}
    assert set(readings(write(tmp_path, files))) == set(KINDS) - device


def test_peak_of_the_device_is_kept_between_readings(tmp_path):
    sampler = MemorySampler(tmp_path, PROCESS)
    for kilobytes, peak in ((300, None), (900, None), (50, None), (200, 900), (1000, 1000), (100, 1000)):
        write(tmp_path, {"proc/meminfo": f"NvMapMemUsed: {kilobytes} kB\n"})
        if peak is None:
            sampler.observe()
        else:
            assert readings_of(sampler) == {"device_used": kilobytes * 1024, "device_peak_used": peak * 1024}
    (tmp_path / "proc/meminfo").unlink()
    sampler.observe()
    assert readings_of(sampler) == {"device_peak_used": 1000 * 1024}


def test_largest_free_blocks(tmp_path):
    for buddyinfo, size, total in (
        ("Node 0, zone Normal 5 0 0 0 0 0 0 0 0 8 0\n", 2 * 2**20, 16 * 2**20),  # 8x2MB in the words of tegrastats
        ("Node 0, zone Normal 9 0 0 0 0 0 0 0 0 0 1\nNode 1, zone Normal 9 0 0 0 0 0 0 0 0 0 2\n", 2**22, 3 * 2**22),
        ("Node 0, zone Normal 0 0 0 0 0 0 0 0 0 0 0\n", None, None),
        ("Node 0, zone Normal N/A\n", None, None),
    ):
        found = readings(write(tmp_path, {**FILES, "proc/buddyinfo": buddyinfo}))
        assert (found.get("largest_free_block"), found.get("largest_free_blocks_total")) == (size, total)


def test_device_memory_in_nvmap(tmp_path):
    for clients, size in (
        ("total 4321 524688K\nuser a 43210 1K\nuser b 432 1K\n", None),
        ("user a 4321 1K\nuser my server 4321 2M\nuser b 1 7K\n", 1024 + 2 * 1024**2),
        *((f"user server 4321 {size}\n", None) for size in ("", "K", "0", "4096", "12X", "²K", "-1K", "1.5K", "K12")),
    ):
        files = {**FILES, "sys/kernel/debug/nvmap/iovmm/clients": clients}
        assert readings(write(tmp_path, files)).get("device_process") == size


def test_malformed_line_is_absent(tmp_path):
    for line in ("MemTotal: ² kB", "MemTotal: -1 kB", "MemTotal: 12 MB", "MemTotal: 12", "MemTotal 12 kB"):
        found = readings(write(tmp_path, {**FILES, "proc/meminfo": f"{line}\nMemAvailable: 1 kB\n"}))
        assert "system_total" not in found
        assert found["system_available"] == 1024


def test_bytes_that_are_not_text_are_ignored(tmp_path):
    write(tmp_path, FILES)
    for name in FILES:
        path = tmp_path / name
        path.write_bytes(b"\xff\xfe\0\n:\n" + path.read_bytes() + b"\n\xff")
    assert readings(tmp_path) == {kind: size for kind, size in KINDS.items() if kind != "device_allocated"}


def test_memory_of_this_machine():
    sampler, truth = MemorySampler(), psutil.Process()
    found = readings_of(sampler)
    assert abs(found["process_rss"] - truth.memory_info().rss) < 0.2 * truth.memory_info().rss
    assert 0 < found["process_pss"] <= found["process_rss"] * 1.01  # read a moment apart
    assert found["process_peak_rss"] >= found["process_rss"]
    assert abs(sampler.process_rss_bytes() - found["process_rss"]) < 0.2 * found["process_rss"]
    assert found["system_total"] == psutil.virtual_memory().total
    assert 0 < found["system_available"] < found["system_total"]
