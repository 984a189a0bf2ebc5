"""Loads a bundle as a model that can serve: every tier, built where the runtime needs it, checked and measured."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar

from edge.bundles.bundle import Bundle
from edge.bundles.fields import Role
from edge.errors import BackendError, LoadFailed, UsageError
from edge.instruments.memory import MemorySampler
from edge.repository.budget import MemoryBudget
from edge.repository.model import Model
from edge.runtimes import cache as builds
from edge.runtimes.build import Loaded, build_with, has_build, load_with, not_built
from edge.runtimes.build_child import stopped
from edge.runtimes.runtime import BuildProgress, Runtime, Source
from edge.runtimes.table import choose, first_that_works
from edge.scheduling.scheduler import Scheduler
from edge.scheduling.tier_executor import ServingOptions

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Interval at which a build that waits for another one checks whether to stop.
_WAIT_SECONDS = 0.2
#: Seconds between two lines of the log during a build.
_LOG_SECONDS = 30.0

#: Reports the progress of a build, such as ``BUILDING 42 %, 3 min left``, and nothing when the builds have ended.
ReportProgress = Callable[[str], None]


#: A sound load may take this much on any machine, whatever limit there is for runs, and a second more for each so many
#: bytes of its bundle.
LEAST_LOAD_SECONDS = 10.0
_BYTES_PER_SECOND = 2_000_000


def load_limit_seconds(bundle: Bundle, watchdog_seconds: float) -> float:
    """Return the time, without its builds, that the load of a bundle may take."""
    return max(watchdog_seconds, LEAST_LOAD_SECONDS) + bundle.size_bytes / _BYTES_PER_SECOND


class Loader:
    """Loads models while others serve.

    Where runners belong to the device's thread, that thread loads one tier at a time and runs requests in between. A
    request then waits at most for the loading of one runner, its golden set, and a few runs that measure it: a GPU
    takes no second thread, and a model that was not checked must not serve. Elsewhere requests do not wait, but share
    the processor. A build runs in a process of its own, one at a time, and no request waits for it. A reload needs the
    memory of both models until the new one has taken over.

    With the target ``auto``, a model that one runtime cannot build or load is loaded by the next one, all tiers by the
    same. ``cache`` is the directory of built models; with ``build``, models that it lacks are built.
    """

    def __init__(
        self,
        device: Scheduler,
        target: str = "auto",
        cache: Path | None = None,
        options: ServingOptions = ServingOptions(),  # noqa: B008 - it is frozen
        budget: MemoryBudget | None = None,
        build: bool = True,
    ) -> None:
        self._device, self._target, self._cache = device, target, cache
        self._options, self._budget, self._build = options, budget, build
        self._building = threading.Lock()
        #: The bundle whose load occupies the device's thread, and since when in ``time.monotonic()``; None without one.
        self.occupied_by: tuple[Bundle, float] | None = None

    def check_cache(self) -> None:
        """Log a warning where models may have to be built and the cache cannot be written."""
        if not self._build or not choose(self._target).isolated_build:
            return
        try:
            builds.check_writable(self._cache)
        except UsageError as error:
            log.warning("models that are not in the cache cannot be built: %s", error)

    def needs_build(self, bundle: Bundle) -> bool:
        """Return whether loading a model begins with a build, which takes minutes."""
        try:
            runtime = choose(self._target)
            return self._build and runtime.isolated_build and bool(self._unbuilt(runtime, bundle))
        except Exception:  # the load reports it
            return False

    def prepare(self, bundle: Bundle, progress: ReportProgress, stop: threading.Event) -> None:
        """Build what a runtime lacks, or check the files that it reads, so that :meth:`load_model` takes seconds.

        That loads the model with this runtime or with another one. Raise as it does, for a bundle that no runtime of
        the target can load.
        """

        def prepare(runtime: Runtime) -> None:
            unbuilt = self._unbuilt(runtime, bundle)
            if runtime.isolated_build and self._build:
                self._build_all(runtime, bundle, unbuilt, progress, stop)
                return
            for tier, role in unbuilt:
                source = Source.of(bundle, runtime, tier, role)
                if runtime.isolated_build:
                    raise not_built(runtime, source, self._cache)
                bundle.check(source.artifact.file)

        first_that_works(self._target, str(bundle.path), prepare)

    def load_model(
        self,
        bundle: Bundle,
        progress: ReportProgress = lambda text: None,
        stop: threading.Event | None = None,
        *,
        evicts: bool = False,
    ) -> Model:
        """Return a model whose every tier has reproduced its golden set and has been timed.

        This takes seconds, and minutes with a build, which reports its ``progress`` and ends when ``stop`` is set. A
        caller that ``evicts`` other models gets the error of a runtime that lacks memory, and not the next runtime's
        model.

        Raises:
            LoadFailed: the model does not fit into the memory, or ``stop`` was set during a build.
            FewheadsError: as :func:`edge.runtimes.build.load_runner`. Nothing stays loaded.
        """

        def load(runtime: Runtime) -> Model:
            try:
                return self._load_with(runtime, bundle, progress, stop or threading.Event())
            except BackendError as error:
                if not (evicts and error.lacks_memory):
                    raise
                lacking = LoadFailed(error.subject, given=error.given, expected=error.expected, fix=error.fix)
                lacking.lacks_memory = True
                raise lacking from error

        return first_that_works(self._target, str(bundle.path), load)

    def _load_with(self, runtime: Runtime, bundle: Bundle, progress: ReportProgress, stop: threading.Event) -> Model:
        builds = self._build and runtime.isolated_build
        if builds:
            self._build_all(runtime, bundle, self._unbuilt(runtime, bundle), progress, stop)
        try:
            model = self._load(runtime, bundle)
        except BackendError:
            broken = self._unbuilt(runtime, bundle, record_only=False) if builds else []
            if not broken:
                raise
            self._build_all(runtime, bundle, broken, progress, stop)  # its memory is not this model's: none is reserved
            model = self._load(runtime, bundle)
        if self._budget and model.runner.device == "CPU":  # memory of a GPU is not part of the process's size
            self._budget.learn(bundle, model.load_memory_bytes)
        return model

    def _unbuilt(self, runtime: Runtime, bundle: Bundle, *, record_only: bool = True) -> list[tuple[str, Role]]:
        """Return the tier and role of each file without a build; by the records alone, a build may be broken."""
        return [
            (tier, role)
            for tier, role in _files(bundle)
            if not has_build(runtime, Source.of(bundle, runtime, tier, role), self._cache, record_only=record_only)
        ]

    def _build_all(
        self,
        runtime: Runtime,
        bundle: Bundle,
        files: list[tuple[str, Role]],
        progress: ReportProgress,
        stop: threading.Event,
    ) -> None:
        try:
            for tier, role in files:
                self._build_file(runtime, bundle, tier, role, progress, stop)
        finally:
            progress("")

    def _build_file(
        self, runtime: Runtime, bundle: Bundle, tier: str, role: Role, progress: ReportProgress, stop: threading.Event
    ) -> None:
        of = f" (tier {tier})" if len(bundle.manifest.tiers) > 1 else ""
        of += f" ({role})" if len(bundle.manifest.roles) > 1 else ""
        logged = -_LOG_SECONDS

        def report(position: BuildProgress) -> None:
            nonlocal logged
            progress(f"BUILDING {position}{of}")
            if time.monotonic() - logged >= _LOG_SECONDS:
                logged = time.monotonic()
                log.info("%s: BUILDING %s%s for %s", bundle.path.name, position, of, runtime.name)

        while not self._building.acquire(timeout=_WAIT_SECONDS):
            progress(f"BUILDING waits for another build{of}")
            if stop.is_set():
                raise stopped(f"build of bundle {bundle.path}")
        try:
            build_with(runtime, bundle, self._cache, tier, role, progress=report, stop=stop)
        finally:
            self._building.release()

    def _load(self, runtime: Runtime, bundle: Bundle) -> Model:
        memory, begun_ns = MemorySampler(), time.perf_counter_ns()
        before = memory.process_rss_bytes()
        files: dict[tuple[str, Role], Loaded] = {}
        with self._budget.reserved(bundle, runtime) if self._budget else nullcontext(), ExitStack() as failed:
            for tier, role in _files(bundle):
                load = partial(load_with, runtime, bundle, self._cache, tier, role)
                loaded = files[tier, role] = self._call(runtime, bundle, load)
                failed.callback(self._device.call, loaded.runner.close)
            # A head uploads its tensors, which only the thread of the device may do.
            model = self._call(runtime, bundle, partial(Model, bundle, files, options=self._options))
            model.load_memory_bytes = max(memory.process_rss_bytes() - before, 0)
            self._call(runtime, bundle, model.check_steps)
            self._call(runtime, bundle, model.measure)
            failed.pop_all()
        _trim_memory()  # the memory of the file and of its optimisation
        model.load_ns = time.perf_counter_ns() - begun_ns
        return model

    def _call(self, runtime: Runtime, bundle: Bundle, work: Callable[[], T]) -> T:
        """Do a part of a load on the device's thread, whose loads come one after the other."""

        def timed() -> T:
            if runtime.thread_bound:
                self.occupied_by = bundle, time.monotonic()
            try:
                return work()
            finally:
                self.occupied_by = None

        return self._device.call(timed)

    def close(self, model: Model) -> None:
        """Close a model on the thread that owns it, and return its memory to the system."""
        self._device.call(model.close)
        if self._budget:
            self._budget.closed(model.manifest)
        _trim_memory()


def _files(bundle: Bundle) -> list[tuple[str, Role]]:
    return [(tier.name, role) for tier in bundle.manifest.tiers for role in bundle.manifest.roles]


def _trim_memory() -> None:  # otherwise glibc keeps hundreds of megabytes; other C libraries do not
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
