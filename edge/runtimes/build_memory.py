"""Memory check before a build: the estimated peak against the available memory."""

from __future__ import annotations

from edge.errors import BackendError, Raw
from edge.instruments.memory import MemorySampler
from edge.runtimes.runtime import BuildOptions, Runtime, Source

#: The way out of a build without memory.
MORE_MEMORY = "Stop other models and programs, add swap, or lower --workspace-mib"
_MIB = 1024**2


def check(runtime: Runtime, source: Source, options: BuildOptions, sampler: MemorySampler | None = None) -> None:
    """Check that the system has the memory for a build, unless the options skip this or the memory cannot be read.

    Raises:
        BackendError: the memory does not suffice; the message gives all numbers.
    """
    needed = None if options.ignore_memory else runtime.build_memory(source, options)
    sampler = sampler or MemorySampler()
    available = sampler.available() if needed else None
    if not needed or not available:
        return
    readings = {reading.kind: reading.size_bytes for reading in sampler.sample()}
    swap = readings.get("swap_total", 0) - readings.get("swap_used", 0)
    # A device's memory is pinned, so swap cannot back it.
    if needed.pinned_bytes <= available.size_bytes and needed.size_bytes <= available.size_bytes + swap:
        return
    estimate = f"{mib(needed.size_bytes)} by the estimate, of which {mib(needed.pinned_bytes)} cannot be swapped"
    given = Raw(f"{mib(available.size_bytes)} available ({available.source}) and {mib(swap)} of free swap")
    fix = f"{MORE_MEMORY} ({options.workspace_bytes // _MIB} now); --ignore-memory builds all the same."
    raise BackendError(f"memory to build {source.subject}", given=given, expected=estimate, fix=fix)


def mib(size_bytes: int) -> str:
    """Return a size for people."""
    return f"{size_bytes / _MIB:,.0f} MiB"
