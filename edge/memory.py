"""Memory of the process, the system and the device, each reading with its source.

On a Jetson the GPU shares the system's DRAM: what it takes shows as ``NvMapMemUsed`` in ``/proc/meminfo``, and what is
free is ``MemAvailable``. ``cudaMemGetInfo`` counts reclaimable page cache as used there, so it is not asked.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

_CLIENTS = "sys/kernel/debug/nvmap/iovmm/clients"
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

    def sample(self) -> tuple[MemoryReading, ...]:
        """Read everything there is. RSS counts shared pages in full, PSS its share of them."""
        meminfo = self._kilobytes("proc/meminfo")
        rollup = self._kilobytes(f"proc/{self._process_id}/smaps_rollup")
        status = self._kilobytes(f"proc/{self._process_id}/status")
        readings = [
            ("process_rss", status.get("VmRSS"), "/proc/self/status VmRSS"),
            ("process_peak_rss", status.get("VmHWM"), "/proc/self/status VmHWM"),
            ("process_pss", rollup.get("Pss"), "/proc/self/smaps_rollup Pss"),
            ("system_available", meminfo.get("MemAvailable"), "/proc/meminfo MemAvailable"),
            ("system_total", meminfo.get("MemTotal"), "/proc/meminfo MemTotal"),
            ("device_used", meminfo.get("NvMapMemUsed"), "/proc/meminfo NvMapMemUsed"),
            ("device_process", self._device_process(), f"/{_CLIENTS}"),
        ]
        return tuple(MemoryReading(kind, size, source) for kind, size, source in readings if size is not None)

    def process_rss_bytes(self) -> int:
        """Return the resident size of the process, or 0 where procfs does not tell it."""
        return self._kilobytes(f"proc/{self._process_id}/status").get("VmRSS", 0)

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

    def _lines(self, path: str) -> list[str]:
        try:
            return (self._root / path).read_text(errors="replace").splitlines()
        except OSError:
            return []
