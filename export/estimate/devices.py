"""Boards and their power modes: clocks and bandwidths that a prediction starts from.

- Power modes and GPU clocks: ``jetson_clocks --show`` and ``nvpmodel -q`` of an Orin Nano Super under JetPack 7.2.1
  (15W, 25W, MAXN_SUPER), and of an Orin Nano whose firmware is not Super (7W, 15W).
- DRAM: LPDDR5 of 128 bits, 32 bytes for each cycle of its clock. The share of it that a run reaches is fitted.
- FLOP per clock: 8 SM with 2,048 FLOP in FP16 each, twice as many in INT8, and 256 in FP32 without tensor cores. A
  Vulkan benchmark measured 9.70 TFLOP/s in FP16 at 612 MHz, of 10.0.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from edge.errors import UsageError

_BYTES_PER_CLOCK = 32
#: FLOP per clock of the GPU by the precision of a product.
FLOP_PER_CLOCK = {"fp32": 2048.0, "fp16": 16384.0, "int8": 32768.0}


class Mode(msgspec.Struct, frozen=True):
    """A power mode."""

    gpu_mhz: float
    memory_mhz: float

    @property
    def peak_gb_per_s(self) -> float:
        """The peak bandwidth of the memory."""
        return 1e-3 * _BYTES_PER_CLOCK * self.memory_mhz

    def tflops(self, precision: str) -> float:
        """Return the peak of a precision, in 10¹² operations per second."""
        return FLOP_PER_CLOCK[precision] * self.gpu_mhz * 1e-6


class Board(msgspec.Struct, frozen=True):
    """A board: its name for people and its power modes by name."""

    name: str
    modes: dict[str, Mode]


#: Boards by the name that ``--device`` takes.
DEVICES = {
    "orin-nano-super": Board(
        "Jetson Orin Nano Super", {"15W": Mode(612, 2133), "25W": Mode(918, 3199), "MAXN_SUPER": Mode(1020, 3199)}
    ),
    "orin-nano": Board("Jetson Orin Nano", {"7W": Mode(408, 2133), "15W": Mode(625, 2133)}),
}


class BoardMode(NamedTuple):
    """A board in a power mode, by the names of :data:`DEVICES`; written ``BOARD:MODE``."""

    board: str
    power_mode: str

    def __str__(self) -> str:
        return f"{self.board}:{self.power_mode}"

    @property
    def mode(self) -> Mode:
        """The clocks of the board in this mode."""
        return DEVICES[self.board].modes[self.power_mode]


#: Every board in each of its power modes, as it is written.
BOARD_MODES = {
    str(each): each for each in (BoardMode(board, mode) for board, device in DEVICES.items() for mode in device.modes)
}
#: Of predictions that name no board. The ratios of tiers in other modes differ by less than the band of a prediction.
DEFAULT_BOARD = BoardMode("orin-nano-super", "15W")


def mode_of(device: str, mode: str) -> Mode:
    """Return a power mode of a board; raise a UsageError that lists the boards, or the modes of this one."""
    if device not in DEVICES:
        boards = " or ".join(f"{name} ({', '.join(each.modes)})" for name, each in DEVICES.items())
        raise UsageError("--device", given=device, expected=boards, fix="Give a board, and one of its modes as --mode.")
    modes = DEVICES[device].modes
    if mode not in modes:
        expected = f"one of {', '.join(modes)}, the modes of {device}"
        raise UsageError("--mode", given=mode, expected=expected, fix="Give one of these, or another --device.")
    return modes[mode]
