"""Conditions of a measurement: the device, its power mode, and signs of throttling."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import NamedTuple

from edge.errors import Raw, UsageError
from edge.instruments.board import read_board
from edge.instruments.kernel_files import read_text
from edge.instruments.sensors import Sensors


class Throttling(NamedTuple):
    """Signs of throttling: number of over-current and low-voltage alarms so far, and active cooling levels."""

    events: int
    levels: tuple[str, ...]

    def since(self, before: Throttling) -> bool:
        """Return whether the device throttled between an earlier reading and this one."""
        return self.events != before.events or bool(self.levels or before.levels)


class Conditions:
    """Reads the conditions of a measurement below ``root``, which is another directory in tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._sensors = Sensors(root)

    def device(self, processor: str) -> str:
        """Return the name of the board, or on another machine of its ``processor``, ``CPU`` or ``GPU``."""
        board = read_board(self._root)
        return (board and board.model) or (processor == "GPU" and _gpu_name(self._root)) or cpu_name(self._root)

    def power_mode(self) -> str:
        """Return the name of the power mode, such as ``25W``; empty on a machine that is not a Jetson.

        Raises:
            UsageError: a Jetson hides it, which could mix timings of two modes.
        """
        board = read_board(self._root)
        if not board:
            return ""
        if not board.power_mode:
            fix = "Mount /etc/nvpmodel.conf, /etc/nvpmodel and /var/lib/nvpmodel read-only, or set one with nvpmodel."
            raise UsageError("power mode", given=Raw("unknown"), expected="the power mode of the board", fix=fix)
        return board.power_mode

    def throttling(self) -> Throttling:
        """Return the present signs of throttling."""
        readings = [reading for reading in self._sensors.sample() if reading.kind == "throttling"]
        events = sum(int(reading.value) for reading in readings if reading.unit == "events")
        return Throttling(events, tuple(r.name for r in readings if r.unit == "level" and r.value > 0))


def cpu_name(root: Path = Path("/")) -> str:
    """Return the name of the processor, or its architecture if the kernel reports no name."""
    return _field(root / "proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def _gpu_name(root: Path) -> str:
    names = (_field(path, "Model") for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")))
    return next(filter(None, names), "")


def _field(path: Path, name: str) -> str:
    found = re.search(rf"^{name}\s*:\s*(.+)$", read_text(path, 2**20), re.MULTILINE)
    return found[1].strip() if found else ""
