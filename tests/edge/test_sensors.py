"""Sensors from the files of an Orin Nano, from broken ones, and from this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.instruments import sensors as module
from edge.instruments.sensors import SensorReading, Sensors
from tests.support.boards import (
    GPU_CLOCKS,
    RAILS,
    STAT,
    STAT_LATER,
    TEMPERATURES,
    as_root,
    in_container,
    link,
    orin_nano,
    write,
)

JETPACKS = (5, 6, 7)
Key = tuple[str, str]


def sampled(sensors: Sensors) -> dict[Key, SensorReading]:
    sample = sensors.sample()
    found = {(reading.kind, reading.name): reading for reading in sample}
    assert len(found) == len(sample)
    return found


def values(root: Path) -> dict[Key, float]:
    return {key: reading.value for key, reading in sampled(Sensors(root)).items()}


def expected(jetpack: int) -> dict[Key, float]:
    suffix = "-therm" if jetpack == 5 else "-thermal"
    return {
        **{("temperature", f"{name}{suffix}"): value / 1000 for name, value in TEMPERATURES.items()},
        **{("power", rail): volts * amperes / 1e6 for rail, (volts, amperes) in RAILS.items()},
        ("frequency", "gpu"): 306e6,
        ("frequency", "cpu0"): 729.6e6,
        ("frequency", "cpu4"): 1344e6,
        ("frequency_limit", "gpu-min"): GPU_CLOCKS[jetpack][0],
        ("frequency_limit", "gpu-max"): GPU_CLOCKS[jetpack][1],
        ("frequency_limit", "emc-max"): 2133e6 if jetpack == 5 else 3199e6,
        ("utilization", "gpu"): 0.842,
        ("fan", "pwmfan"): 60 / 255,
        ("fan", "pwm_tach"): 1843,
        ("throttling", "oc1"): 0,
        ("throttling", "oc2"): 15,
        ("throttling", "oc3"): 37,
        ("throttling", "cpu-throttle-alert"): 0,
        ("throttling", "gpu-throttle-alert"): 1,
    }


@pytest.mark.parametrize("jetpack", JETPACKS)
def test_an_orin_nano(tmp_path: Path, jetpack: int) -> None:
    assert values(orin_nano(tmp_path, jetpack)) == pytest.approx(expected(jetpack))


def test_every_reading_has_its_unit_and_its_source(tmp_path: Path) -> None:
    found = sampled(Sensors(orin_nano(tmp_path, 6)))
    units = {reading.unit for reading in found.values()}
    assert units == {"celsius", "watts", "ratio", "hertz", "rpm", "events", "level"}
    sources = {key: reading.source for key, reading in found.items()}
    assert sources["temperature", "cpu-thermal"] == "/sys/class/thermal/thermal_zone0/temp"
    assert sources["power", "VDD_IN"] == "/sys/class/hwmon/hwmon1/in1_input curr1_input"
    assert sources["utilization", "gpu"] == "/sys/class/devfreq/17000000.gpu/device/load"


def test_clock_and_load_of_the_memory_for_root(tmp_path: Path) -> None:
    found = sampled(Sensors(as_root(orin_nano(tmp_path, 6))))
    assert found["frequency", "emc"].value == 2133e6
    load = found["utilization", "emc"]
    assert load.value == pytest.approx(0.61)
    assert load.source == "/sys/kernel/debug/cactmon/mc_all / sys/kernel/debug/bpmp/debug/clk/emc/rate"


@pytest.mark.parametrize("rate", ["0", "N/A"])
def test_the_load_of_a_memory_without_a_clock_is_absent(tmp_path: Path, rate: str) -> None:
    write(as_root(orin_nano(tmp_path, 6)), {"sys/kernel/debug/bpmp/debug/clk/emc/rate": rate})
    assert ("utilization", "emc") not in values(tmp_path)


@pytest.mark.parametrize("limit", ["0", str(2**63 - 1)])
def test_no_limit_of_a_clock_is_absent(tmp_path: Path, limit: str) -> None:
    """nvpmodel writes 0 for the memory, and scripts that lift all limits the largest number for the GPU."""
    root = orin_nano(tmp_path, 6)
    places = ("sys/kernel/nvpmodel_clk_cap/emc", "sys/class/devfreq/17000000.gpu/max_freq")
    write(root, dict.fromkeys(places, limit))
    assert not {("frequency_limit", "emc-max"), ("frequency_limit", "gpu-max")} & set(values(root))


@pytest.mark.parametrize("jetpack", JETPACKS)
def test_a_container_hides_no_sensor(tmp_path: Path, jetpack: int) -> None:
    assert values(in_container(orin_nano(tmp_path, jetpack))) == pytest.approx(expected(jetpack))


@pytest.mark.parametrize("place", ["sys/devices/gpu.0/load", "sys/devices/platform/gpu.0/load"])
def test_the_load_where_devfreq_does_not_lead(tmp_path: Path, place: str) -> None:
    write(tmp_path, {place: "500\n"})
    assert values(tmp_path) == {("utilization", "gpu"): 0.5}


def test_no_file_at_all(tmp_path: Path) -> None:
    sensors = Sensors(tmp_path)
    sensors.observe()
    sensors.observe()
    assert sensors.sample() == ()


def test_a_desktop_has_few(tmp_path: Path) -> None:
    files = {
        "sys/class/thermal/thermal_zone0/type": "acpitz\n",
        "sys/class/thermal/thermal_zone0/temp": "27800\n",
        "sys/class/thermal/thermal_zone1/type": "acpitz\n",
        "sys/class/thermal/thermal_zone1/temp": "29800\n",
        "sys/class/thermal/cooling_device0/type": "Processor\n",
        "sys/class/thermal/cooling_device0/cur_state": "3\n",
        "sys/class/hwmon/hwmon0/name": "nvme\n",
        "sys/class/hwmon/hwmon0/temp1_input": "38850\n",
        "sys/class/hwmon/hwmon1/name": "coretemp\n",
        "sys/class/hwmon/hwmon1/in1_label": "VDD_IN\n",
        "sys/class/hwmon/hwmon1/in1_input": "1\n",
        "sys/class/hwmon/hwmon1/curr1_input": "1\n",
        "sys/class/devfreq/ddr/cur_freq": "1\n",
    }
    assert values(write(tmp_path, files)) == {("temperature", "acpitz"): 27.8, ("temperature", "acpitz-2"): 29.8}


def sensor_paths(root: Path) -> dict[Key, Path]:
    return {key: root / reading.source.split()[0].lstrip("/") for key, reading in sampled(Sensors(root)).items()}


#: Never a number, or one that no sensor can mean.
BROKEN = [
    "",
    "\n",
    "N/A",
    "n/a",
    "-256000",
    "0x10",
    "1e3",
    "4 5",
    "1_000",
    "٣",
    "²",
    "--5",
    "nan",
    "\0",
    "9" * 65,
    "1\n2",
]


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_no_number_is_absent(tmp_path: Path, text: str) -> None:
    orin_nano(tmp_path, 6)
    paths = sensor_paths(tmp_path)
    for path in paths.values():
        path.write_text(text)
    # Alarms of the thermal zones and over-currents cannot be negative, power can.
    assert set(values(tmp_path)) <= ({("power", rail) for rail in RAILS} if text == "-256000" else set())


@pytest.mark.parametrize("key", [("temperature", "gpu-thermal"), ("power", "VDD_IN"), ("utilization", "gpu")])
def test_one_that_is_off_harms_no_other(tmp_path: Path, key: Key) -> None:
    orin_nano(tmp_path, 6)
    sensors = Sensors(tmp_path)
    path = sensor_paths(tmp_path)[key]
    before = set(sampled(sensors))
    path.unlink()
    assert set(sampled(sensors)) == before - {key}
    path.mkdir()
    assert set(sampled(sensors)) == before - {key}


def test_a_sensor_that_answers_try_again(tmp_path: Path) -> None:
    """The zones of the vision accelerators do so while these are off; Python's files would raise a TypeError."""
    orin_nano(tmp_path, 6)
    path = sensor_paths(tmp_path)["temperature", "cv0-thermal"]
    path.unlink()
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        with pytest.raises(BlockingIOError):
            os.read(writer, 1)
        found = values(tmp_path)
    finally:
        os.close(writer)
    assert ("temperature", "cv0-thermal") not in found
    assert found["temperature", "cv1-thermal"] == 48.235


@pytest.mark.parametrize("load", ["1001", "-1", "99999999"])
def test_a_load_beyond_all_is_absent(tmp_path: Path, load: str) -> None:
    orin_nano(tmp_path, 6)
    sensor_paths(tmp_path)["utilization", "gpu"].write_text(load)
    assert ("utilization", "gpu") not in values(tmp_path)


@pytest.mark.parametrize("load", ["0", "1000"])
def test_an_idle_and_a_busy_gpu(tmp_path: Path, load: str) -> None:
    orin_nano(tmp_path, 6)
    sensor_paths(tmp_path)["utilization", "gpu"].write_text(load)
    assert values(tmp_path)["utilization", "gpu"] == int(load) / 1000


@pytest.mark.parametrize("name", [b"", b"\xff\xfe", b"a\nb", b"x" * 65, b"\x1b[31mred"])
def test_names_that_cannot_be_shown(tmp_path: Path, name: bytes) -> None:
    zone = tmp_path / "sys/class/thermal/thermal_zone0"
    write(zone, {"temp": "40000\n"})
    (zone / "type").write_bytes(name)
    # What is no text is shown as such.
    assert set(values(tmp_path)) <= {("temperature", "\N{REPLACEMENT CHARACTER}" * 2)}


def test_names_are_told_apart(tmp_path: Path) -> None:
    for number, name in enumerate(["x", "x-2", "x", "x"]):
        write(tmp_path / f"sys/class/thermal/thermal_zone{number}", {"type": name, "temp": f"{number}000"})
    found = {name: value for (_, name), value in values(tmp_path).items()}
    assert found == {"x": 0, "x-2": 1, "x-3": 2, "x-4": 3}


def test_zones_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 9, 1):
        write(tmp_path / f"sys/class/thermal/thermal_zone{number}", {"type": "same", "temp": f"{number}000"})
    assert list(values(tmp_path).values()) == [1, 9, 10]


def test_a_channel_that_is_not_connected(tmp_path: Path) -> None:
    chip = tmp_path / "sys/class/hwmon/hwmon0"
    write(chip, {"name": "ina3221", "in1_label": "NC", "in1_input": "1", "curr1_input": "1"})
    assert values(tmp_path) == {}


def test_links_in_a_circle_do_no_harm(tmp_path: Path) -> None:
    link(tmp_path / "sys/class/devfreq/17000000.gpu", "17000000.gpu")
    link(tmp_path / "sys/class/thermal", "thermal")
    assert values(tmp_path) == {}


def test_a_driver_that_comes_late_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sensors = Sensors(tmp_path)
    orin_nano(tmp_path, 6)
    assert sensors.sample() == ()
    later = time.monotonic() + module._SEARCH_SECONDS
    monkeypatch.setattr(module.time, "monotonic", lambda: later)
    assert ("utilization", "gpu") in sampled(sensors)


def test_the_processors_over_time(tmp_path: Path) -> None:
    sensors = Sensors(orin_nano(tmp_path, 6))
    load = ("utilization", "cpu")
    assert load not in sampled(sensors)
    sensors.observe()
    assert load not in sampled(sensors)  # since the boot says nothing of now
    write(tmp_path, {"proc/stat": STAT_LATER})
    sensors.observe()
    assert [sampled(sensors)[load].value for _ in range(2)] == [0.25, 0.25]
    sensors.observe()
    assert load not in sampled(sensors)  # not one tick has passed


@pytest.mark.parametrize(
    "line", ["", "cpu", "cpu 1 2 3", "cpu0 9 9 9 9 9 9 9 9", "cpu a b c d e f g h", "cpu " + "-9 " * 8]
)
def test_a_broken_clock_of_the_processors(tmp_path: Path, line: str) -> None:
    sensors = Sensors(write(tmp_path, {"proc/stat": STAT}))
    sensors.observe()
    write(tmp_path, {"proc/stat": f"{line}\n"})
    sensors.observe()
    assert sensors.sample() == ()


def test_a_clock_that_goes_backwards(tmp_path: Path) -> None:
    sensors = Sensors(write(tmp_path, {"proc/stat": STAT_LATER}))
    sensors.observe()
    write(tmp_path, {"proc/stat": STAT})
    sensors.observe()
    assert sensors.sample() == ()


@given(text=st.text(max_size=70))
@settings(deadline=None, max_examples=50)
def test_garbage_does_no_harm(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    root = orin_nano(tmp_path_factory.mktemp("root"), 6)
    for path in [*sensor_paths(root).values(), *root.glob("sys/class/thermal/*/type"), root / "proc/stat"]:
        path.write_text(text, errors="replace")
    sensors = Sensors(root)
    sensors.observe()
    sensors.observe()
    for reading in sensors.sample():
        reading.name.encode()


def test_this_machine() -> None:
    sensors = Sensors()
    sensors.observe()
    limit = time.monotonic() + 0.1
    while time.monotonic() < limit:
        pass
    sensors.observe()
    found = sampled(sensors)
    assert 0 < found["utilization", "cpu"].value <= 1
    assert all(-60 <= reading.value <= 200 for reading in found.values() if reading.kind == "temperature")
