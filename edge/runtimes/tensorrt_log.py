"""The builder's log: kernels that it did not try for lack of memory, and builds that failed for it."""

from __future__ import annotations

import re

#: TensorRT words it "Skipping tactic N due to insufficient memory on requested size of N detected for tactic N", and
#: "Tactic Device request: 4229MB Available: 2658MB. Device memory is insufficient to use tactic."
_SKIPPED = re.compile(r"insufficient memory|memory is insufficient to use tactic", re.IGNORECASE)
_REQUESTED = re.compile(r"request(?:ed size of|: )\s*(\d+)\s*(MB|MiB)?", re.IGNORECASE)
_OUT_OF_MEMORY = re.compile(
    r"out ?of ?memory|insufficient (?:memory|workspace)|cannot allocate memory|NvMapMemAlloc\w* *:? *\d+ error 12",
    re.IGNORECASE,
)
_MIB = 1024**2


class BuilderLog:
    """Counts what the builder's warnings say of memory. Its ``hear`` is the listener of the logger."""

    def __init__(self) -> None:
        self.skipped_tactics = 0
        self.most_requested_bytes = 0
        self.out_of_memory = ""

    def hear(self, message: str) -> None:
        """Take one warning or error of the builder."""
        if _SKIPPED.search(message):
            self.skipped_tactics += 1
            found = _REQUESTED.search(message)
            if found:
                size = int(found[1]) * (_MIB if found[2] else 1)
                self.most_requested_bytes = max(self.most_requested_bytes, size)
        elif _OUT_OF_MEMORY.search(message):
            self.out_of_memory = message

    def warning(self) -> str:
        """Return a warning for people; empty where no kernel was skipped."""
        if not self.skipped_tactics:
            return ""
        asked = f", of up to {self.most_requested_bytes / _MIB:,.0f} MiB each" if self.most_requested_bytes else ""
        return (
            f"{self.skipped_tactics} tactics were skipped for lack of memory{asked}, so the engine may be slower than "
            "it could be; stop other programs or raise --workspace-mib, and build it again with --replace"
        )
