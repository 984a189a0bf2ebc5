"""Memory of the process, the system and the device, each reading with its source.

On a Jetson the GPU shares the system's DRAM. ``/proc/meminfo`` reports the GPU's part as ``NvMapMemUsed``;
``cudaMemGetInfo`` would count reclaimable page cache as used. GPU memory cannot be swapped, and it needs blocks of
adjacent pages: their largest size, and the bytes that are free in blocks of that size, show the fragmentation.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from edge.instruments.sensors import read_text, whole

_CLIENTS = "sys/kernel/debug/nvmap/iovmm/clients"
_ALLOCATED = "sys/kernel/debug/nvmap/stats/total_memory"
_BUDDYINFO = "proc/buddyinfo"
_LONGEST = 2**20
_CGROUPS = "sys/fs/cgroup"
_UNITS = {"B": 1, "K": 1024, "M": 1024**2, "G": 1024**3}


class MemoryReading(msgspec.Struct, frozen=True):
    """A size, and the file that it was read from."""

    kind: str
    size_bytes: int
    source: str


class MemorySampler:
    """Reads memory from procfs and sysfs; what cannot be read is absent, never zero."""

    def __init__(self, root: Path = Path("/"), process_id: int | None = None) -> None:
        self._root = root
        self._process_id = os.getpid() if process_id is None else process_id
        self._device_peak: int | None = None

    def observe(self) -> None:
        """Update the peak of the device's memory, which no file has; to be called about once a second."""
        self._meminfo()

    def sample(self) -> tuple[MemoryReading, ...]:
        """Read all sizes. RSS counts shared pages in full, PSS counts the process's share of them."""
        meminfo = self._meminfo()
        has_device = "NvMapMemUsed" in meminfo
        device_total = meminfo.get("MemTotal") if has_device else None
        block, blocks = self._free_blocks() if has_device else (None, None)
        swap, swap_free = meminfo.get("SwapTotal"), meminfo.get("SwapFree")
        swap_used = None if swap is None or swap_free is None else max(swap - swap_free, 0)
        allocated = whole(read_text(self._root / _ALLOCATED))  # by all processes; only root may read it
        rollup = self._kilobytes(f"proc/{self._process_id}/smaps_rollup")
        status = self._kilobytes(f"proc/{self._process_id}/status")
        readings = [
            ("process_rss", status.get("VmRSS"), "/proc/self/status VmRSS"),
            ("process_peak_rss", status.get("VmHWM"), "/proc/self/status VmHWM"),
            ("process_pss", rollup.get("Pss"), "/proc/self/smaps_rollup Pss"),
            ("system_available", meminfo.get("MemAvailable"), "/proc/meminfo MemAvailable"),
            ("limit_available", self._limit_available(), f"/{_CGROUPS} memory.max"),
            ("system_total", meminfo.get("MemTotal"), "/proc/meminfo MemTotal"),
            ("swap_used", swap_used, "/proc/meminfo SwapTotal - SwapFree"),
            ("swap_total", swap, "/proc/meminfo SwapTotal"),
            ("device_used", meminfo.get("NvMapMemUsed"), "/proc/meminfo NvMapMemUsed"),
            ("device_peak_used", self._device_peak, "/proc/meminfo NvMapMemUsed, the highest seen by this process"),
            ("device_total", device_total, "/proc/meminfo MemTotal, which the device shares"),
            ("device_process", self._device_process(), f"/{_CLIENTS}"),
            ("device_allocated", None if allocated is None or allocated < 0 else allocated, f"/{_ALLOCATED}"),
            ("largest_free_block", block, f"/{_BUDDYINFO}"),
            ("largest_free_blocks_total", blocks, f"/{_BUDDYINFO}, all free blocks of this size"),
        ]
        return tuple(MemoryReading(kind, size, source) for kind, size, source in readings if size is not None)

    def available(self) -> MemoryReading | None:
        """Return the memory that the process can still allocate: the system's, or less within a limit."""
        return min(
            (reading for reading in self.sample() if reading.kind.endswith("_available")),
            key=lambda reading: reading.size_bytes,
            default=None,
        )

    def process_rss_bytes(self) -> int:
        """Return the resident size of the process; 0 where it cannot be read."""
        return self._kilobytes(f"proc/{self._process_id}/status").get("VmRSS", 0)

    def contiguous_bytes(self) -> int | None:
        """Return the pool of adjacent memory that Linux reserves for devices (CMA); None if it has none."""
        return self._meminfo().get("CmaTotal")

    def _meminfo(self) -> dict[str, int]:
        sizes = self._kilobytes("proc/meminfo")
        if "NvMapMemUsed" in sizes:
            self._device_peak = max(sizes["NvMapMemUsed"], self._device_peak or 0)
        return sizes

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
        """Return the process's memory in NvMap, which only root may read. Lines end in a PID and a size like 184K."""
        total = None
        for line in self._lines(_CLIENTS):
            words = line.split()
            if len(words) >= 4 and words[-2] == str(self._process_id):
                number, unit = words[-1][:-1], words[-1][-1]
                if number.isdecimal() and unit in _UNITS:
                    total = (total or 0) + int(number) * _UNITS[unit]
        return total

    def _free_blocks(self) -> tuple[int, int] | tuple[None, None]:
        """Return the largest size of free blocks (lfb in tegrastats), and the bytes of all blocks of this size.

        A line counts a zone's free blocks of 1, 2, 4 and so on pages.
        """
        counts: dict[int, int] = {}
        for line in self._lines(_BUDDYINFO):
            for order, word in enumerate(line.partition(" zone ")[2].split()[1:]):
                counts[order] = counts.get(order, 0) + (int(word) if word.isascii() and word.isdigit() else 0)
        free = [order for order, count in counts.items() if count]
        if not free:
            return None, None
        order = max(free)
        size = os.sysconf("SC_PAGE_SIZE") << order
        return size, counts[order] * size

    def _limit_available(self) -> int | None:
        """Return the rest of the tightest limit on the process's control groups, such as systemd's MemoryMax.

        Control groups count cached pages of files too; these count as free here, because the kernel can reclaim them.
        """
        lines = self._lines(f"proc/{self._process_id}/cgroup")
        paths = [Path(line[3:].strip("/")) for line in lines if line.startswith("0::/")][:1]
        left = []
        for parent in [*paths, *(parent for path in paths for parent in path.parents)]:
            group = f"{_CGROUPS}/{parent}"
            limit, used = (self._lines(f"{group}/memory.{name}") for name in ("max", "current"))
            if limit and used and limit[0].isdecimal() and used[0].isdecimal():
                words = [line.split() for line in self._lines(f"{group}/memory.stat")]
                files = sum(int(w[1]) for w in words if w[0:1] == ["inactive_file"] and w[1:] and w[1].isdecimal())
                left.append(max(int(limit[0]) - int(used[0]) + files, 0))
        return min(left, default=None)

    def _lines(self, path: str) -> list[str]:
        return read_text(self._root / path, _LONGEST).splitlines()
