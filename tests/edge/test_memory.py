"""Memory readings from the files of a Jetson, from broken ones, and from this machine."""

from __future__ import annotations

from pathlib import Path

import psutil

from edge.instruments.memory import MemorySampler
from tests.support.boards import BUDDYINFO, write

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


def readings(root: Path) -> dict[str, int]:
    return readings_of(MemorySampler(root, PROCESS))


def readings_of(sampler: MemorySampler) -> dict[str, int]:
    return {reading.kind: reading.size_bytes for reading in sampler.sample()}


def test_memory_of_a_jetson(tmp_path: Path) -> None:
    sample = MemorySampler(write(tmp_path, FILES), PROCESS).sample()
    assert sorted((reading.kind, reading.size_bytes) for reading in sample) == sorted(KINDS.items())
    sources = {reading.kind: reading.source for reading in sample}
    assert sources["device_used"] == "/proc/meminfo NvMapMemUsed"
    assert sources["device_process"] == "/sys/kernel/debug/nvmap/iovmm/clients"
    assert sources["process_pss"] == "/proc/self/smaps_rollup Pss"


def test_unreadable_file_affects_only_its_readings(tmp_path: Path) -> None:
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


def test_empty_file_system_has_no_readings_and_a_machine_without_swap_zero_bytes(tmp_path: Path) -> None:
    sampler = MemorySampler(tmp_path, PROCESS)
    assert (sampler.sample(), sampler.process_rss_bytes()) == ((), 0)
    write(tmp_path, {"proc/meminfo": "SwapTotal: 0 kB\nSwapFree: 0 kB\n"})
    assert readings_of(sampler) == {"swap_total": 0, "swap_used": 0}


def test_machine_without_nvmap(tmp_path: Path) -> None:
    meminfo = "".join(line for line in MEMINFO.splitlines(keepends=True) if not line.startswith("NvMap"))
    files = {**FILES, "proc/meminfo": meminfo}
    del files["sys/kernel/debug/nvmap/iovmm/clients"], files["sys/kernel/debug/nvmap/stats/total_memory"]
    device = {kind for kind in KINDS if kind.startswith(("device_", "largest_"))}
    assert set(readings(write(tmp_path, files))) == set(KINDS) - device


def test_peak_of_the_device_is_kept_between_readings(tmp_path: Path) -> None:
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


def test_largest_free_blocks(tmp_path: Path) -> None:
    for buddyinfo, size, total in (
        ("Node 0, zone Normal 5 0 0 0 0 0 0 0 0 8 0\n", 2 * 2**20, 16 * 2**20),  # 8x2MB in the words of tegrastats
        ("Node 0, zone Normal 9 0 0 0 0 0 0 0 0 0 1\nNode 1, zone Normal 9 0 0 0 0 0 0 0 0 0 2\n", 2**22, 3 * 2**22),
        ("Node 0, zone Normal 0 0 0 0 0 0 0 0 0 0 0\n", None, None),
        ("Node 0, zone Normal N/A\n", None, None),
    ):
        found = readings(write(tmp_path, {**FILES, "proc/buddyinfo": buddyinfo}))
        assert (found.get("largest_free_block"), found.get("largest_free_blocks_total")) == (size, total)


def test_device_memory_in_nvmap(tmp_path: Path) -> None:
    for clients, size in (
        ("total 4321 524688K\nuser a 43210 1K\nuser b 432 1K\n", None),
        ("user a 4321 1K\nuser my server 4321 2M\nuser b 1 7K\n", 1024 + 2 * 1024**2),
        *((f"user server 4321 {size}\n", None) for size in ("", "K", "0", "4096", "12X", "²K", "-1K", "1.5K", "K12")),
    ):
        files = {**FILES, "sys/kernel/debug/nvmap/iovmm/clients": clients}
        assert readings(write(tmp_path, files)).get("device_process") == size


def test_malformed_line_is_absent(tmp_path: Path) -> None:
    for line in ("MemTotal: ² kB", "MemTotal: -1 kB", "MemTotal: 12 MB", "MemTotal: 12", "MemTotal 12 kB"):
        found = readings(write(tmp_path, {**FILES, "proc/meminfo": f"{line}\nMemAvailable: 1 kB\n"}))
        assert "system_total" not in found
        assert found["system_available"] == 1024


def test_bytes_that_are_not_text_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    for name in FILES:
        path = tmp_path / name
        path.write_bytes(b"\xff\xfe\0\n:\n" + path.read_bytes() + b"\n\xff")
    assert readings(tmp_path) == {kind: size for kind, size in KINDS.items() if kind != "device_allocated"}


def test_memory_of_this_machine() -> None:
    sampler, truth = MemorySampler(), psutil.Process()
    found = readings_of(sampler)
    assert abs(found["process_rss"] - truth.memory_info().rss) < 0.2 * truth.memory_info().rss
    assert 0 < found["process_pss"] <= found["process_rss"] * 1.01  # read a moment apart
    assert found["process_peak_rss"] >= found["process_rss"]
    assert abs(sampler.process_rss_bytes() - found["process_rss"]) < 0.2 * found["process_rss"]
    assert found["system_total"] == psutil.virtual_memory().total
    assert 0 < found["system_available"] < found["system_total"]
