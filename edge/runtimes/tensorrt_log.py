"""The builder's log: kernels that it did not try for lack of memory, and builds that failed for it."""

from __future__ import annotations

import re

#: TensorRT's two warnings of one kernel: "Tactic Device request: 4229MB Available: 2658MB. Device memory is
#: insufficient to use tactic." and "Skipping tactic 0 due to insufficient memory on requested size of …".
_REQUESTED = re.compile(r"Tactic Device request: (\d+) ?MB", re.IGNORECASE)
_SKIPPED = re.compile(r"Skipping tactic \S+ due to (?:insufficient memory|oom)", re.IGNORECASE)
_OUT_OF_MEMORY = re.compile(
    r"out ?of ?memory|insufficient (?:memory|workspace)|cannot allocate memory|NvMapMemAlloc\w* *:? *\d+ error 12",
    re.IGNORECASE,
)


def skips_a_tactic(message: str) -> bool:
    """Return whether a warning of the builder is one of the two of a kernel that it did not try."""
    return bool(_REQUESTED.search(message) or _SKIPPED.search(message))


class BuilderLog:
    """Counts the builder's warnings about memory. Its ``hear`` is the listener of the logger."""

    def __init__(self) -> None:
        self.out_of_memory = ""
        self._skipped = 0
        self._requested_mib: list[int] = []

    @property
    def skipped_tactics(self) -> int:
        """How many kernels the builder did not try for lack of memory."""
        return max(self._skipped, len(self._requested_mib))

    def hear(self, message: str) -> bool:
        """Take one warning or error of the builder; return whether :meth:`warning` covers it."""
        requested = _REQUESTED.search(message)
        if requested:
            self._requested_mib.append(int(requested[1]))
        elif _SKIPPED.search(message):
            self._skipped += 1
        elif _OUT_OF_MEMORY.search(message):
            self.out_of_memory = message
        return skips_a_tactic(message)

    def warning(self) -> str:
        """Return a warning for people; empty where no kernel was skipped."""
        if not self.skipped_tactics:
            return ""
        asked = f" of up to {max(self._requested_mib):,} MiB each" if self._requested_mib else ""
        return (
            f"{self.skipped_tactics} tactics were skipped for lack of memory{asked}, so the engine may be slower than "
            "it could be; stop other programs or raise --workspace-mib, and build it again with --replace"
        )
