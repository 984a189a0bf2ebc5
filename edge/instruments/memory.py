"""Memory of the process, the system and the device, each reading with its source.

On a Jetson the GPU shares the system's DRAM: what it takes shows as ``NvMapMemUsed`` in ``/proc/meminfo``, and what is
free is ``MemAvailable``, and what there is in all is ``MemTotal``. ``cudaMemGetInfo`` counts reclaimable page cache as
used there, so it is not asked.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

_CLIENTS = "sys/kernel/debug/nvmap/iovmm/clients"
_CGROUPS = "sys/fs/cgroup"
_UNITS = {"B": 1, "K": 1024, "M": 1024**2, "G": 1024**3}


class MemoryReading(msgspec.Struct, frozen=True):
    """One number: what it counts, how much, and where it was read."""

    kind: str
    size_bytes: int
    source: str


class MemorySampler:
    """Reads memory from procfs and sysfs; a reading that cannot be had is absent, never zero.

    Args:
        root: the root of the file system, another one in tests.
        process_id: the process to read; this one by default.
    """

    def __init__(self, root: Path = Path("/"), process_id: int | None = None) -> None:
        self._root = root
        self._process_id = os.getpid() if process_id is None else process_id
        self._device_peak: int | None = None

    def note(self) -> None:
        """Look at the device's use, for its high-water mark, which no file keeps: about once a second."""
        self._note(self._kilobytes("proc/meminfo"))

    def sample(self) -> tuple[MemoryReading, ...]:
        """Read everything there is. RSS counts shared pages in full, PSS its share of them."""
        meminfo = self._kilobytes("proc/meminfo")
        self._note(meminfo)
        device_total = meminfo.get("MemTotal") if "NvMapMemUsed" in meminfo else None
        rollup = self._kilobytes(f"proc/{self._process_id}/smaps_rollup")
        status = self._kilobytes(f"proc/{self._process_id}/status")
        readings = [
            ("process_rss", status.get("VmRSS"), "/proc/self/status VmRSS"),
            ("process_peak_rss", status.get("VmHWM"), "/proc/self/status VmHWM"),
            ("process_pss", rollup.get("Pss"), "/proc/self/smaps_rollup Pss"),
            ("system_available", meminfo.get("MemAvailable"), "/proc/meminfo MemAvailable"),
            ("limit_available", self._limit_available(), f"/{_CGROUPS} memory.max"),
            ("system_total", meminfo.get("MemTotal"), "/proc/meminfo MemTotal"),
            ("device_used", meminfo.get("NvMapMemUsed"), "/proc/meminfo NvMapMemUsed"),
            ("device_peak_used", self._device_peak, "/proc/meminfo NvMapMemUsed, the highest seen by this process"),
            ("device_total", device_total, "/proc/meminfo MemTotal, which the device shares"),
            ("device_process", self._device_process(), f"/{_CLIENTS}"),
        ]
        return tuple(MemoryReading(kind, size, source) for kind, size, source in readings if size is not None)

    def available(self) -> MemoryReading | None:
        """Return what can be had still, of the system or within the limits of this process, whichever is less."""
        return min(
            (reading for reading in self.sample() if reading.kind.endswith("_available")),
            key=lambda reading: reading.size_bytes,
            default=None,
        )

    def process_rss_bytes(self) -> int:
        """Return the resident size of the process, or 0 where procfs does not tell it."""
        return self._kilobytes(f"proc/{self._process_id}/status").get("VmRSS", 0)

    def _note(self, meminfo: dict[str, int]) -> None:
        used = meminfo.get("NvMapMemUsed")
        if used is not None:
            self._device_peak = max(used, self._device_peak or 0)

    def _kilobytes(self, path: str) -> dict[str, int]:
        """Parse lines like ``MemTotal:  7803900 kB`` into bytes."""
        sizes = {}
        for line in self._lines(path):
            name, _, rest = line.partition(":")
            words = rest.split()
            if len(words) == 2 and words[1] == "kB" and words[0].isdecimal():
                sizes[name] = int(words[0]) * 1024
        return sizes

    def _device_process(self) -> int | None:
        """Return what NvMap holds for the process, if it may be asked. Lines end in a PID and a size like 184K."""
        total = None
        for line in self._lines(_CLIENTS):
            words = line.split()
            if len(words) >= 4 and words[-2] == str(self._process_id):
                number, unit = words[-1][:-1], words[-1][-1]
                if number.isdecimal() and unit in _UNITS:
                    total = (total or 0) + int(number) * _UNITS[unit]
        return total

    def _limit_available(self) -> int | None:
        """Return what is left of the tightest limit on the control groups of the process, such as systemd's MemoryMax.

        Pages of files that were read count there, and are given up when memory is short, so they are taken for free.
        """
        group = next(
            (line[3:] for line in self._lines(f"proc/{self._process_id}/cgroup") if line.startswith("0::")), ""
        )
        left = []
        for parent in [Path(group.strip("/")), *Path(group.strip("/")).parents] if group else []:
            place = f"{_CGROUPS}/{parent}"
            limit, used = (self._lines(f"{place}/memory.{name}") for name in ("max", "current"))
            if limit and used and limit[0].isdecimal() and used[0].isdecimal():
                words = [line.split() for line in self._lines(f"{place}/memory.stat")]
                files = sum(int(w[1]) for w in words if w[0:1] == ["inactive_file"] and w[1:] and w[1].isdecimal())
                free = int(limit[0]) - int(used[0]) + files
                left.append(max(free, 0))
        return min(left, default=None)

    def _lines(self, path: str) -> list[str]:
        try:
            return (self._root / path).read_text(errors="replace").splitlines()
        except OSError:
            return []
