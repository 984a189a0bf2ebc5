"""Health and readiness of the server and of each model, computed from the runs and the repository when it is read."""

from __future__ import annotations

import asyncio
import math
import time
from typing import NamedTuple

from edge.errors import DeviceFailed, DrainTimeout, FewheadsError, Raw, RunStuck
from edge.protocol import INFERENCE, TELEMETRY
from edge.repository.entry import Entry, State
from edge.repository.loader import load_limit_seconds
from edge.repository.repository import Repository
from edge.scheduling.runs import Run, Runs

#: A run is stuck after this many times the 99th percentile of the runs of its tier and size.
_TIMES_P99 = 10
#: Mean deviations between mean and 99th percentile of a normal distribution, which are 2.3 standard deviations.
_P99_DEVIATIONS = 2.9


class Overdue(NamedTuple):
    """A stuck run, its duration so far and its limit, in seconds."""

    run: Run
    seconds: float
    limit: float

    def __str__(self) -> str:
        return f"{_name(self.run)} takes longer than its limit of {self.limit:.1f} s"


class Health:
    """Readiness and problems of the server, cheap to read on any thread; only the event loop changes what it keeps.

    A run of less than ``watchdog_seconds`` is not stuck. With ``strict_readiness``, the server is ready only while
    every wanted model is, but for those that are loaded on demand.
    """

    def __init__(
        self, repository: Repository, runs: Runs, *, watchdog_seconds: float = math.inf, strict_readiness: bool = True
    ) -> None:
        self._repository, self._runs, self._watchdog_seconds = repository, runs, watchdog_seconds
        self._strict_readiness = strict_readiness
        # Whether the server takes requests: from the end of the first load to the start of the drain.
        self.accepting = False
        self.draining = asyncio.Event()  # set by :meth:`drain`
        # The health that clients see, by the name of a service or model; the empty name is the whole server.
        self.serving = {"": False, INFERENCE: False, TELEMETRY: True}
        self.changed = asyncio.Event()  # set, and replaced, when ``serving`` changes

    def accept(self) -> None:
        """Take requests, unless the server drains."""
        self.accepting = not self.draining.is_set()
        self.publish()

    def drain(self) -> None:
        """Take no further request, and serve nothing for good."""
        self.accepting = False
        self.draining.set()
        self.publish()

    def publish(self) -> None:
        """Update ``serving``; a model that is gone stays in it."""
        names = self.serving.keys() | {entry.name for entry in self._repository}
        if self.draining.is_set():
            serving = dict.fromkeys(names, False)
        else:
            server = dict.fromkeys(("", INFERENCE), self.server_ready()) | {TELEMETRY: True}
            serving = {name: self.name_ready(name) for name in names} | server
        if serving != self.serving:
            self.serving = serving
            changed, self.changed = self.changed, asyncio.Event()
            changed.set()

    def server_ready(self) -> bool:
        """Return whether the server takes requests, its device works and, if strict, every wanted model is ready."""
        return self.accepting and self.server_sound() and (self.models_ready() or not self._strict_readiness)

    def overdue(self) -> list[Overdue]:
        """Return the stuck runs: those beyond the limit, and ten times the 99th percentile of their tier and size."""
        timed = (Overdue(run, seconds, self._limit(run)) for run, seconds in self._current())
        return [overdue for overdue in timed if overdue.seconds > overdue.limit]

    def server_sound(self) -> bool:
        """Return whether the device works and no run is stuck, whatever the state of single models."""
        return not self._runs.lost and not self.overdue()

    def models_ready(self) -> bool:
        """Return whether every wanted model that no request loads is ready."""
        wanted = (entry for entry in self._repository if entry.wanted and not entry.on_demand)
        return all(self.state(entry)[0] == "READY" for entry in wanted)

    def name_ready(self, name: str) -> bool:
        """Return whether any version of a model is ready."""
        return any(self.model_ready(entry) for entry in self._repository if entry.name == name)

    def model_ready(self, entry: Entry) -> bool:
        """Return whether a version of a model is READY, or would be loaded for a request."""
        if entry.state == "READY":
            return self.state(entry)[0] == "READY"
        return entry.answers and self.server_sound()

    def state(self, entry: Entry) -> tuple[State, str]:
        """Return the state and its reason, as clients see them: a READY model with a problem is UNAVAILABLE."""
        reason = self._model_problem(entry) if entry.state == "READY" else ""
        return ("UNAVAILABLE", reason) if reason else (entry.state, entry.reason)

    def problems(self) -> list[str]:
        """Return the problems of the server and its models; empty if there are none."""
        problems = [f"the device is lost: {self._runs.lost}"] if self._runs.lost else []
        problems += map(str, self.overdue())
        for entry in self._repository:
            subject = f"{entry.name}:{entry.version}" if entry.version else entry.name
            if entry.wanted and entry.state == "UNAVAILABLE":
                problems.append(f"{subject} is not served: {entry.reason}")
            elif entry.state == "READY":
                if entry.reason and not entry.progress:
                    problems.append(f"{subject} differs from the repository: {entry.reason}")
                if broken := _broken(entry):
                    problems.append(f"{subject}: {broken}")
        return problems

    def failure(self, stuck_exit_seconds: float) -> FewheadsError | None:
        """Return an error that only a restart cures, such as a run stuck ``stuck_exit_seconds`` too long."""
        if lost := self._runs.lost:
            fix = "Start the server again; if it happens again, look at the device."
            return DeviceFailed("server", given=Raw(lost), expected="a device that computes", fix=fix)
        bundle, since = self._repository.loader.occupied_by or (None, 0.0)
        seconds = time.monotonic() - since
        if bundle and seconds > load_limit_seconds(bundle, self._watchdog_seconds) + stuck_exit_seconds:
            given = Raw(f"a load of {bundle.path} that has occupied the device for {seconds:.1f} s")
            fix = "Start the server again; if it happens again, look at the golden inputs of the bundle in the log."
            return RunStuck("server", given=given, expected="it to end", fix=fix)
        for overdue in self.overdue():
            limit = overdue.limit + stuck_exit_seconds
            if overdue.seconds > limit:
                given, expected = Raw(f"{overdue}: {overdue.seconds:.1f} s"), f"it to end within {limit:.1f} s"
                fix = "Start the server again; raise --watchdog-seconds if such a run is normal."
                return RunStuck("server", given=given, expected=expected, fix=fix)
        return None

    def drain_timeout(self, seconds: float) -> DrainTimeout:
        """Return the error of a shutdown that took longer than ``seconds``; it names the runs that still compute."""
        runs = [f"{_name(run)} after {seconds:.1f} s" for run, seconds in self._current()]
        given = Raw(", ".join(runs) or "models that still load or close")
        fix = "Raise --drain-seconds if that work should have ended."
        return DrainTimeout("shutdown", given=given, expected=f"an end within {seconds:g} s", fix=fix)

    def _current(self) -> list[tuple[Run, float]]:
        now = time.monotonic()
        return [(run, now - run.begun) for run in list(self._runs.now) if run]

    def _limit(self, run: Run) -> float:
        usual = run.call_seconds(_P99_DEVIATIONS)
        return max(self._watchdog_seconds, _TIMES_P99 * usual)

    def _model_problem(self, entry: Entry) -> str:
        if self._runs.lost:
            return self._runs.lost
        overdue = self.overdue()
        if len(overdue) == len(self._runs.now):  # every worker is stuck
            return str(overdue[0])
        stuck = [late for late in overdue if late.run.executor.model == f"{entry.name}:{entry.version}"]
        return str(stuck[0]) if stuck else _broken(entry)


def _name(run: Run) -> str:
    return f"a run of {run.executor.model} (tier {run.executor.tier})"


def _broken(entry: Entry) -> str:
    model = entry.model  # read once: it may be unloaded at any moment
    broken = [(each.tier, each.failures.broken) for each in (model.executors.values() if model else ())]
    return "; ".join(f"tier {tier} fails: {reason}" for tier, reason in broken if reason)
