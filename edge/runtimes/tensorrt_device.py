"""GPU state that all TensorRT models of a process share: one context, one order of runs, one activation memory."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Protocol

from edge.runtimes.cuda import Device, Memory, abandon
from edge.runtimes.device_errors import fatal_name


class ArenaUser(Protocol):
    """A model whose activations are in the arena."""

    def arena_moves(self, arena: Memory) -> None:
        """Use another arena from now on, and drop the graphs that contain the address of the old one.

        No run is in progress. The old arena is freed afterwards.
        """


class SharedDevice:
    """Streams and activation memory of all TensorRT models, while at least one is loaded.

    All runs go through one stream, one after the other, so they share one activation memory, as large as the largest
    model needs. It grows when a model is loaded, and is freed with the last model.

    Attributes:
        device: its context; everything else must be used inside ``with device:``.
        compute: the stream of all runs and of copies to the host.
        uploads: the stream of copies to the device, which overlap a run.
        arena: the activation memory.
        counts: graph ``captures``, graph ``launches`` and plain ``enqueues`` since the first model was loaded.

    Raises:
        BackendError: pycuda is missing, or there is no GPU.
        pycuda.driver.Error: the device cannot be used.
    """

    def __init__(self) -> None:
        self.device = Device()
        self.counts: Counter[str] = Counter()
        self._users: list[ArenaUser] = []
        try:
            with self.device:
                self.compute = self.device.stream()
                self.uploads = self.device.stream()
                self.arena = self.device.allocate(0)
        except BaseException:
            vars(self).pop("compute", None)  # a stream is freed with its last reference
            self.device.close()
            raise

    def join(self, user: ArenaUser, size_bytes: int) -> None:
        """Let a model use the arena, which grows to at least ``size_bytes``.

        Raises:
            pycuda.driver.Error: there is not enough memory, or the device fails. The arena is unchanged.
        """
        if size_bytes > self.arena.size_bytes:
            arena = self.device.allocate(size_bytes)
            try:
                self.compute.synchronize()
            except BaseException:
                arena.free()
                raise
            for other in self._users:
                other.arena_moves(arena)
            self.arena.free()
            self.arena = arena
        user.arena_moves(self.arena)
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
        """Return whether the device is lost."""
        try:
            with self.device:
                return self.synchronize() is not None
        except self.device.errors:  # the context cannot be made current
            return True

    def leave(self, user: ArenaUser | None) -> None:
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
    """Return the device of this process. The first model opens it, on the thread that loads it.

    Raises:
        BackendError: pycuda is missing, or there is no GPU.
        pycuda.driver.Error: the device cannot be used.
    """
    global _shared
    _shared = _shared or SharedDevice()
    return _shared
