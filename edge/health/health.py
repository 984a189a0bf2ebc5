"""Whether the server, and each of its models, is sound: derived from what has happened, never noted by hand.

Readiness, the gRPC health service, RepositoryIndex, telemetry, the supervisor's notifications and the exit code all ask
here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

from edge.errors import DeviceFailed, DrainTimeout, FewheadsError, Literally, RunStuck
from edge.repository.repository import Entry, Repository, State
from edge.scheduling.runs import Run, Runs

#: A run is stuck after so many times what nearly all runs of its tier and size have taken,
_TIMES_P99 = 10
#: which is so many mean deviations above their mean: for a normal distribution 2.3 standard deviations are 2.9.
_P99_DEVIATIONS = 2.9


class Overdue(NamedTuple):
    """A run that takes much longer than it should: whose, for how long, and what its limit was, in seconds."""

    run: Run
    seconds: float
    limit: float

    def __str__(self) -> str:
        lane = self.run.lane
        return f"a run of {lane.model} (tier {lane.tier}) takes longer than its limit of {self.limit:.1f} s"


class Health:
    """What is wrong, if anything is. Cheap to ask, from any thread; nothing is kept, so nothing can be out of date.

    Args:
        repository: the models.
        runs: what the workers are at.
        watchdog_seconds: how long any run may take, however short those of its tier are usually; infinite watches none.
    """

    def __init__(self, repository: Repository, runs: Runs, *, watchdog_seconds: float = math.inf) -> None:
        self._repository = repository
        self._runs = runs
        self._watchdog_seconds = watchdog_seconds

    @property
    def lost(self) -> str:
        """Why nothing can be computed any more; empty while that is not so."""
        return self._runs.lost

    def overdue(self) -> list[Overdue]:
        """Return the runs that take longer than the limit, and than ten times what those of their size do."""
        now = time.monotonic()
        runs = [run for run in list(self._runs.now) if run]
        timed = [Overdue(run, now - run.begun, self._limit(run)) for run in runs]
        return [overdue for overdue in timed if overdue.seconds > overdue.limit]

    def server_sound(self) -> bool:
        """Whether there is a device, and no run is stuck on it. What is wrong with a single model is not asked."""
        return not self.lost and not self.overdue()

    def models_ready(self) -> bool:
        """Whether every model that is wanted can be asked."""
        return all(self.state(entry)[0] == "READY" for entry in self._repository if entry.wanted)

    def name_ready(self, name: str) -> bool:
        """Whether any version of a model can be asked: the highest that can decides, so none is hidden by another."""
        return any(self.state(entry)[0] == "READY" for entry in self._repository if entry.name == name)

    def state(self, entry: Entry) -> tuple[State, str]:
        """Return a model's state and the reason, as clients shall see them. One that is unsound is not ready."""
        reason = self._model_problem(entry) if entry.state == "READY" else ""
        return ("UNAVAILABLE", reason) if reason else (entry.state, entry.reason)

    def problems(self) -> list[str]:
        """Return why the server, or a part of it, is not healthy; empty when all is well."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        if self.lost:
            yield f"nothing can be computed any more: {self.lost}"
        overdue = self.overdue()
        yield from map(str, overdue)
        for entry in self._repository:
            subject = f"{entry.name}:{entry.version}" if entry.version else entry.path.name
            if entry.wanted and entry.state == "UNAVAILABLE":
                yield f"{subject} is not served: {entry.reason}"
            elif entry.state == "READY":
                if entry.reason:
                    yield f"{subject} is not what lies in the repository: {entry.reason}"
                broken = _broken(entry)
                if broken:
                    yield f"{subject}: {broken}"

    def failure(self, stuck_exit_seconds: float) -> FewheadsError | None:
        """Return why the process should end, so that its supervisor starts another one; None if it should not.

        Args:
            stuck_exit_seconds: how long a run that is stuck is waited for.
        """
        fix = "Start the server again; if it happens again, look at the device."
        if self.lost:
            return DeviceFailed("server", given=Literally(self.lost), expected="a device that computes", fix=fix)
        for overdue in self.overdue():
            limit = overdue.limit + stuck_exit_seconds
            if overdue.seconds > limit:
                fix = "Start the server again; raise --watchdog-seconds if the run was right."
                expected = f"it to end within {limit:.1f} s"
                return RunStuck(
                    "server", given=Literally(f"{overdue}: {overdue.seconds:.1f} s"), expected=expected, fix=fix
                )
        return None

    def drain_timeout(self, seconds: float) -> DrainTimeout:
        """Return the error of a shutdown that did not end within some seconds."""
        now = time.monotonic()
        runs = [run for run in list(self._runs.now) if run]
        at = [f"a run of {run.lane.model} (tier {run.lane.tier}) since {now - run.begun:.1f} s" for run in runs]
        given = Literally(", ".join(at) or "models that are loaded or closed")
        fix = "Raise --drain-seconds if what was cut short should have ended."
        return DrainTimeout("shutdown", given=given, expected=f"an end within {seconds:g} s", fix=fix)

    def _limit(self, run: Run) -> float:
        usual = run.lane.latency.seconds(run.size, _P99_DEVIATIONS) or 0.0
        return max(self._watchdog_seconds, _TIMES_P99 * usual)

    def _model_problem(self, entry: Entry) -> str:
        if self.lost:
            return self.lost
        overdue = self.overdue()
        if len(overdue) == len(self._runs.now):  # nobody is left to compute any model
            return str(overdue[0])
        own = [late for late in overdue if late.run.lane.model == f"{entry.name}:{entry.version}"]
        return str(own[0]) if own else _broken(entry)


def _broken(entry: Entry) -> str:
    model = entry.model  # once: it may be unloaded at any moment
    lanes = model.lanes.values() if model else ()
    return "; ".join(f"tier {lane.tier} fails: {lane.record.broken}" for lane in lanes if lane.record.broken)
