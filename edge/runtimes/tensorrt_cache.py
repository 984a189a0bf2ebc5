"""Keys and values of a decoder in device memory, laid out so that one copy reaches all layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from typing import Any

from edge.runtimes.cuda import Device, Slices
from edge.runtimes.host import Group
from edge.runtimes.tensorrt.engine import ALIGNMENT, Shape


class Entries:
    """Tensors [rows, heads, places, width] in one memory, those of a group one behind the other.

    A line has the places of one head, and a slice is one tensor.

    Args:
        address: of the memory. Entries without one tell their size.
    """

    def __init__(self, groups: tuple[Group, ...], rows: int, places: int, address: int = 0) -> None:
        self._groups, self.rows, self.places = groups, rows, places
        self._starts: list[Slices] = []  # of the groups
        end = address
        for group in groups:
            pitch = places * group.entry_bytes
            step = ALIGNMENT // gcd(ALIGNMENT, pitch)
            lines = -(-rows * group.heads // step) * step
            self._starts.append(Slices(end, pitch, lines))
            end += len(group.names) * lines * pitch
        self.size_bytes = end - address

    def at(self, address: int) -> Entries:
        """Return the same entries in a memory."""
        return Entries(self._groups, self.rows, self.places, address)

    def addresses(self) -> Mapping[str, int]:
        """Return the address of each tensor."""
        return dict(self._tensors())

    def shapes(self, rows: int) -> Mapping[str, Shape]:
        """Return the shape of each tensor, of its first rows."""
        return {name: (rows, one.heads, self.places, one.width) for one in self._groups for name in one.names}

    def clear(self, device: Device, row: int, rows: int, stream: Any) -> None:
        """Enqueue a fill of some rows with zeros."""
        for group, start in zip(self._groups, self._starts, strict=True):
            row_bytes = group.heads * start.pitch
            for number in range(len(group.names)):
                address = start.address + number * start.lines * start.pitch + row * row_bytes
                device.clear(address, rows * row_bytes, stream)

    def copy(
        self,
        source: Entries,
        moved: tuple[int, int],
        device: Device,
        stream: Any,
        *,
        rows: int,
        place: int,
        places: int,
    ) -> None:
        """Enqueue copies from the first places of rows of other entries, one for each group.

        Args:
            source: with the same groups, or these entries themselves.
            moved: the first row there, and the first one here.
            place: the first one here.
        """
        for group, start, other in zip(self._groups, self._starts, source._starts, strict=True):
            there, here = (row * group.heads for row in moved)
            target = start.address + here * start.pitch + place * group.entry_bytes
            device.copy_slices(
                start._replace(address=target),
                other._replace(address=other.address + there * other.pitch),
                (places * group.entry_bytes, rows * group.heads, len(group.names)),
                stream,
            )

    def _tensors(self) -> Iterator[tuple[str, int]]:
        for group, start in zip(self._groups, self._starts, strict=True):
            for number, name in enumerate(group.names):
                yield name, start.address + number * start.lines * start.pitch
