"""Tells what health has become to those who asked to be told: clients that watch it, the log, and systemd."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from edge.errors import RequestError, RunnerError
from edge.health.health import Health
from edge.health.systemd import Notifier
from edge.repository.model import Model
from edge.repository.repository import Repository
from edge.scheduling.job import Job
from edge.scheduling.lane import Lane
from edge.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25
#: Between two looks at whether a tier that is broken is so still.
_PROBE_SECONDS = 5.0
#: systemd advises half of its time; a third leaves room for a late one.
_PINGS_PER_PERIOD = 3


class Supervisor:
    """Runs on the event loop; a loop that hangs pings nobody, which is true as well.

    Args:
        health: what is told.
        repository: the models.
        scheduler: where a suspect tier is asked for its golden row.
        server_ready: whether the server as a whole is ready.
        set_health: tells the health of a service or model, by name.
        services: the names that stand for the server as a whole.
        notifier: of systemd.
    """

    def __init__(
        self,
        health: Health,
        repository: Repository,
        scheduler: Scheduler,
        *,
        server_ready: Callable[[], bool],
        set_health: Callable[[str, bool], None],
        services: Iterable[str],
        notifier: Notifier,
    ) -> None:
        self._health = health
        self._repository = repository
        self._scheduler = scheduler
        self._server_ready = server_ready
        self._set_health = set_health
        self._services = tuple(services)
        self._notifier = notifier
        self._told: dict[str, bool] = {}
        self._problems: list[str] = []
        self._status = ""
        self._pinged = 0.0
        self._probes: dict[Lane, asyncio.Task[None]] = {}

    def publish(self) -> None:
        """Tell what differs from what was told last."""
        names = {entry.name for entry in self._repository} | self._told.keys() - {*self._services}
        ready = {name: self._server_ready() for name in self._services}
        ready |= {name: self._health.name_ready(name) for name in names}
        changed = {name: serving for name, serving in ready.items() if self._told.get(name) != serving}
        self._told.update(changed)
        for name, serving in changed.items():
            self._set_health(name, serving)
        self._tell_systemd()

    async def run(self) -> None:
        """Look at the health again and again, until this is cancelled."""
        while True:
            try:
                self._log()
                self._probe()
                self.publish()
            except Exception:  # or what was told last would be told for ever
                log.exception("the health cannot be told")
            await asyncio.sleep(_LOOK_SECONDS)

    def _log(self) -> None:
        problems = self._health.problems()
        for problem in problems:
            if problem not in self._problems:
                log.error("not healthy: %s", problem)
        for problem in self._problems:
            if problem not in problems:
                log.info("healthy again: %s", problem)
        self._problems = problems

    def _tell_systemd(self) -> None:
        entries = [entry for entry in self._repository if entry.wanted]
        serving = sum(self._health.state(entry)[0] == "READY" for entry in entries)
        status = "; ".join([f"{serving} of {len(entries)} models ready", *self._problems])
        if status != self._status:
            self._status = status
            self._notifier.notify(STATUS=status)
        # Only for what a new process would cure: with a broken bundle it would end in the same way for ever.
        seconds = self._notifier.watchdog_seconds
        if seconds and time.monotonic() - self._pinged >= seconds / _PINGS_PER_PERIOD and self._health.server_sound():
            self._pinged = time.monotonic()
            self._notifier.notify(WATCHDOG=1)

    def _probe(self) -> None:
        """Ask suspect tiers for their golden rows, so that it is known whether they, or their requests, are wrong."""
        for model in [entry.model for entry in self._repository if entry.model]:
            for name, lane in model.lanes.items():
                if lane.record.suspect and lane not in self._probes:
                    task = asyncio.create_task(self._ask(model, name))
                    self._probes[lane] = task
                    task.add_done_callback(lambda _, lane=lane: self._probes.pop(lane))  # type: ignore[misc]

    async def _ask(self, model: Model, name: str) -> None:
        lane, inputs = model.lanes[name], model.golden_row(name)
        if not model.lease.take():
            return
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        rows = len(next(iter(inputs.values())))

        def deliver(jobs: Sequence[Job]) -> None:
            loop.call_soon_threadsafe(ended.set)

        job = Job(lane, inputs, rows, lease=model.lease, deliver=deliver)
        try:
            if not self._scheduler.submit(job):
                await ended.wait()
        except RequestError:  # there is no room for it now
            self._scheduler.give_back(model.lease)
        else:
            error = job.take_error()
            if error is None:
                return
            if isinstance(error, RunnerError) or not isinstance(error, RequestError):
                lane.record.condemn(f"{type(error).__name__}: {error}")
        await asyncio.sleep(_PROBE_SECONDS)
