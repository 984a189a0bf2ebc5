"""Supervision: publishes changes of the health, probes suspect tiers, and ends a process that only a restart helps."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from edge.errors import DeviceFailed, DrainTimeout, FewheadsError, RequestError, RunnerError
from edge.health.health import Health
from edge.repository.model import Model
from edge.repository.repository import Repository
from edge.scheduling.job import Job
from edge.scheduling.scheduler import Scheduler
from edge.scheduling.tier_executor import TierExecutor

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25
#: Between two probes of a tier.
_PROBE_SECONDS = 5.0
#: systemd advises two; three leave room for a late one.
_PINGS_PER_PERIOD = 3
#: Time for waiting requests to be rejected after the device is lost.
_REFUSALS_SECONDS = 2.0


class Notifier:
    """Sends notifications by systemd's protocol, a datagram each to the socket ``NOTIFY_SOCKET``, or nothing
    without one. An error is logged once, and nothing is sent again.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # An abstract socket begins with NUL, for which systemd writes @ in the environment.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        interval = environment.get("WATCHDOG_USEC", "")
        is_addressed = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        microseconds = int(interval) if address and is_addressed and interval.isascii() and interval.isdecimal() else 0
        # Time without a ping after which systemd ends this process; None if it does not.
        self.watchdog_seconds = microseconds / 1e6 or None

    def notify(self, **fields: str | int) -> None:
        """Send assignments, for example ``READY=1``; line feeds in values become spaces."""
        if not self._address:
            return
        message = "\n".join(f"{name}={' '.join(str(value).splitlines())}" for name, value in fields.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)  # a full socket must not block the server
                sender.sendto(message.encode(errors="backslashreplace"), self._address)
        except BlockingIOError:
            log.warning("NOTIFY_SOCKET is full; a notification is dropped")
        except OSError as error:
            log.warning("NOTIFY_SOCKET fails, and no further notification is sent: %s", error)
            self._address = ""


class Supervisor:
    """Reads the health four times a second, on the event loop, so that a hanging loop stops the pings to systemd."""

    def __init__(self, health: Health, repository: Repository, scheduler: Scheduler, notifier: Notifier) -> None:
        self._health, self._repository, self._scheduler = health, repository, scheduler
        self._notifier = notifier
        self._problems: list[str] = []
        self._status = ""
        self._pinged = 0.0
        self._probes: dict[TierExecutor, asyncio.Task[None]] = {}

    def publish(self) -> None:
        """Publish the health to clients and systemd; an error is logged."""
        try:
            self._health.publish()
            self._notify_systemd()
        except Exception:  # the caller is in the middle of a change
            log.exception("the health cannot be published")

    async def run(self) -> None:
        """Log, probe and publish until the task is cancelled."""
        while True:
            try:
                self._log()
                self._probe_suspects()
            except Exception:  # otherwise the published health would stay as it is
                log.exception("the health cannot be supervised")
            self.publish()
            await asyncio.sleep(_LOOK_SECONDS)

    def _log(self) -> None:
        problems = self._health.problems()
        for problem in [problem for problem in problems if problem not in self._problems]:
            log.error("not healthy: %s", problem)
        for problem in [problem for problem in self._problems if problem not in problems]:
            log.info("healthy again: %s", problem)
        self._problems = problems

    def _notify_systemd(self) -> None:
        entries = [entry for entry in self._repository if entry.wanted]
        serving = sum(self._health.state(entry)[0] == "READY" for entry in entries)
        status = "; ".join([f"{serving} of {len(entries)} models ready", *self._problems])
        if status != self._status:
            self._status = status
            self._notifier.notify(STATUS=status)
        # Pings stop only for problems that a restart cures; a broken bundle would cause endless restarts.
        seconds = self._notifier.watchdog_seconds
        if seconds and time.monotonic() - self._pinged >= seconds / _PINGS_PER_PERIOD and self._health.server_sound():
            self._pinged = time.monotonic()
            self._notifier.notify(WATCHDOG=1)

    def _probe_suspects(self) -> None:
        """Run the golden row of each suspect tier, which tells a broken tier from bad requests."""
        for model in [entry.model for entry in self._repository if entry.model]:
            for name, executor in model.executors.items():
                if executor.failures.suspect and executor not in self._probes:
                    self._probes[executor] = asyncio.create_task(self._probe(model, name, executor))

    async def _probe(self, model: Model, name: str, executor: TierExecutor) -> None:
        try:
            await self._probe_tier(model, name, executor)
        except Exception:
            log.exception("tier %s of %s %s cannot be probed", name, model.name, model.version)
            await asyncio.sleep(_PROBE_SECONDS)
        finally:
            del self._probes[executor]

    async def _probe_tier(self, model: Model, name: str, executor: TierExecutor) -> None:
        inputs = model.golden_row(name)
        if not model.use.take():
            return
        ended, loop = asyncio.Event(), asyncio.get_running_loop()

        def deliver(jobs: Sequence[Job]) -> None:
            loop.call_soon_threadsafe(ended.set)

        rows = len(next(iter(inputs.values())))
        job = Job(executor, inputs, rows, holds=(model.use,), deliver=deliver)
        try:
            if not self._scheduler.submit(job):
                await ended.wait()
        except RequestError:  # the queue is full
            model.use.give_back()
        else:
            error = job.take_error()
            if error is None:
                return
            if isinstance(error, RunnerError) or not isinstance(error, RequestError):
                executor.failures.mark_broken(f"{type(error).__name__}: {error}")
        await asyncio.sleep(_PROBE_SECONDS)


class Watchdog:
    """Ends the process if only a restart helps, as for a run stuck ``stuck_exit_seconds`` beyond its limit."""

    def __init__(self, health: Health, stuck_exit_seconds: float) -> None:
        self._health, self._stuck_exit_seconds = health, stuck_exit_seconds
        self._end_at = math.inf
        self._end_after = math.inf
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def bound_shutdown(self, seconds: float) -> None:
        """End the process in ``seconds`` unless :meth:`close` is called first."""
        self._end_after, self._end_at = seconds, time.monotonic() + seconds

    def close(self) -> None:
        """Stop watching."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(_LOOK_SECONDS):
            error, late = None, time.monotonic() > self._end_at
            try:
                error = self._health.failure(self._stuck_exit_seconds)
                if error is None and late:
                    error = self._health.drain_timeout(self._end_after)
            except Exception:  # the thread must go on, and the shutdown end
                log.exception("the watchdog cannot read the health")
                if late:
                    os._exit(DrainTimeout.exit_code)
            if isinstance(error, DeviceFailed) and self._stopped.wait(_REFUSALS_SECONDS):
                return
            if error:
                _exit(error)


def _exit(error: FewheadsError) -> NoReturn:
    """Write the stack of every thread, and end the process at once; a stuck run would block an orderly exit."""
    try:
        sys.stdout.flush()
        faulthandler.dump_traceback(sys.stderr)
        print(f"fewheads: {error}", file=sys.stderr, flush=True)
    finally:  # even if nobody reads its output
        os._exit(error.exit_code)
