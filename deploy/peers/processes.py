"""Processes of a server and its children: their start, processor time and memory from ``/proc``, and their end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TICK_US = 1e6 / os.sysconf("SC_CLK_TCK")
_MEMORY = re.compile(r"^(Rss|Pss): +(\d+) kB", re.MULTILINE)


def _tree(root: int) -> list[int]:
    """Return a process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [root]
    for process in found:
        found += parents.get(process, [])
    return found


class Watch:
    """Processor time of a server, and of unrelated processes, while the block runs.

    Args:
        root: the server's process.

    Attributes:
        cpu_us: processor time of the server and its descendants in µs, in steps of the kernel's tick.
        foreign_cores: the load of processes that belong neither to the server nor to this process, in cores.
    """

    def __init__(self, root: int) -> None:
        self.cpu_us = 0.0
        self.foreign_cores = 0.0
        self._root = root

    def __enter__(self) -> Watch:
        self._before = self._read()
        return self

    def __exit__(self, *error: object) -> None:
        now = self._read()
        seconds, machine, self.cpu_us, own = (new - old for new, old in zip(now, self._before, strict=True))
        self.foreign_cores = max((machine - self.cpu_us - own) / seconds / 1e6, 0.0)

    def _read(self) -> tuple[float, float, float, float]:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        machine = sum((*fields[:3], *fields[5:8])) * _TICK_US
        server = 0
        for process in _tree(self._root):
            with suppress(OSError):  # it may have ended
                times = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
                server += int(times[11]) + int(times[12])
        return time.monotonic(), machine, server * _TICK_US, sum(os.times()[:4]) * 1e6


def memory_mb(root: int) -> tuple[float, float, int]:
    """Return RSS and PSS in MB, and the number, of a process and its descendants."""
    totals = {"Rss": 0, "Pss": 0}
    processes = _tree(root)
    for process in processes:
        with suppress(OSError):  # it may have ended
            for kind, kilobytes in _MEMORY.findall(Path(f"/proc/{process}/smaps_rollup").read_text()):
                totals[kind] += int(kilobytes)
    return totals["Rss"] / 1000, totals["Pss"] / 1000, len(processes)


def free_ports() -> tuple[int, int]:
    """Return two free ports."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


@contextmanager
def running(
    command: list[str], environment: dict[str, str], directory: Path, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in a session of its own, yield its process, and end all its processes."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=directory,
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            members = _tree(process.pid)
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            for member in members:  # workers that outlive their parent
                with suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            process.wait()
            time.sleep(0.2)
