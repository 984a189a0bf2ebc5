"""GPU state that all TensorRT models of a process share: one context, one order of runs, one activation memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from edge.runtimes.cuda import CudaDevice, Memory, abandon, fatal_name

#: Makes a model use another arena, and drops its graphs, which have the address of the old one. No run is in progress.
ArenaMoves = Callable[[Memory], None]


class SharedDevice:
    """Streams and activation memory of all TensorRT models, while at least one is loaded.

    All runs go through one stream, one after the other, so they share one activation memory, as large as the largest
    model needs. It grows when a model is loaded, and is freed with the last model. Use everything but ``device`` inside
    ``with device:``. The constructor raises the errors of :class:`edge.runtimes.cuda.CudaDevice`.
    """

    def __init__(self) -> None:
        self.device = CudaDevice()
        self.counts: Counter[str] = Counter()  # graph captures and launches, and plain enqueues
        self._users: list[ArenaMoves] = []
        try:
            with self.device:
                self.compute = self.device.stream()  # of all runs and of copies to the host
                self.uploads = self.device.stream()  # of copies to the device, which overlap a run
                self.arena = self.device.allocate(0)
        except BaseException:
            vars(self).pop("compute", None)  # a stream is freed with its last reference
            self.device.close()
            raise

    def join(self, user: ArenaMoves, size_bytes: int) -> None:
        """Let a model use the arena, which grows to at least ``size_bytes``, or is unchanged after an error."""
        if size_bytes > self.arena.size_bytes:
            arena = self.device.allocate(size_bytes)
            try:
                self.compute.synchronize()
            except BaseException:
                arena.free()
                raise
            for arena_moves in self._users:
                arena_moves(arena)
            self.arena.free()
            self.arena = arena
        user(self.arena)
        self._users.append(user)

    def synchronize(self) -> Exception | None:
        """Wait for all work; return the error of a lost device, or None."""
        failures = []
        for stream in (self.uploads, self.compute, self.uploads, self.compute):  # twice, if it is the first to fail
            try:
                stream.synchronize()
            except self.device.errors as error:  # noqa: PERF203 - four times
                failures.append(error)
        return next((error for error in failures if fatal_name(str(error))), None)

    def is_lost(self) -> bool:
        try:
            with self.device:
                return self.synchronize() is not None
        except self.device.errors:  # the context cannot be made current
            return True

    def leave(self, user: ArenaMoves | None) -> None:
        """Remove a closed model, or None if it could not be loaded. The last one closes the device."""
        global _shared
        if user in self._users:
            self._users.remove(user)
        if self._users:
            return
        if _shared is self:
            _shared = None
        if self.is_lost():
            abandon(self.compute, self.uploads, self.arena)
        else:
            with suppress(*self.device.errors), self.device:
                self.arena.free()
                del self.compute, self.uploads
        self.device.close()


_shared: SharedDevice | None = None


def shared_device() -> SharedDevice:
    """Return the device of this process. The first model opens it, on the thread that loads it."""
    global _shared
    _shared = _shared or SharedDevice()
    return _shared
