"""One tier of a loaded model as the scheduler sees it: what computes it, what may share a run, how long a run takes."""

from __future__ import annotations

from dataclasses import dataclass

from edge.programs.program import Options, Program
from edge.scheduling.batching import Joiner
from edge.scheduling.failure_tracker import FailureTracker
from edge.scheduling.latency import LatencyTable

#: Mean deviations above the mean of a run that a promise is made on.
PROMISED_DEVIATIONS = 2.0
#: The same for runs that come before it. What makes one slow, such as a neighbour, often makes all of them slow.
_WAITING_DEVIATIONS = 1.0


@dataclass(frozen=True)
class ServingOptions:
    """What a server says of all its models.

    Attributes:
        instances: how many runs are computed at once.
        batching: whether requests may share a run.
        max_queue_delay_us: how long a request that found the server busy may wait for others to join it; None is
            what each manifest says.
        policy: which tier answers; None is what each manifest says.
    """

    instances: int = 1
    batching: bool = True
    max_queue_delay_us: int | None = None
    policy: str | None = None


class Lane:
    """A tier's way through the scheduler. Nothing that differs in its lane is ever joined.

    Args:
        tier: its name.
        program: computes it.
        joiner: joins inputs.
        max_rows: rows of one run; 0 joins nothing.
        max_delay_seconds: how long a request that found the server busy may wait for others to join it.
        preferred_rows: sizes that a run should have; without any, it takes what is there.
        model: whose tier it is, as name and version with a colon between.
        on_gpu: whether it needs a device that can be lost to the process.

    Attributes:
        options: the program's options for a request of this tier.
        latency: how long its runs take.
        failures: of its runs since the last success.
    """

    def __init__(
        self,
        tier: str,
        program: Program,
        joiner: Joiner,
        *,
        max_rows: int = 0,
        max_delay_seconds: float = 0.0,
        preferred_rows: tuple[int, ...] = (),
        model: str = "",
        on_gpu: bool = False,
    ) -> None:
        self.tier = tier
        self.model = model
        self.on_gpu = on_gpu
        self.program = program
        self.options = Options(tier)
        self.joiner = joiner
        self.max_rows = max_rows
        self.max_delay_seconds = max_delay_seconds if max_rows else 0.0
        self.preferred_rows = preferred_rows
        self.latency = LatencyTable()
        self.failures = FailureTracker()

    def run_seconds(self, size: int) -> float:
        """Predict one run, on the safe side; 0 while nothing is known."""
        return self.latency.seconds(size, PROMISED_DEVIATIONS) or 0.0

    def seconds(self, jobs: int, rows: int, size: int) -> float:
        """Predict the runs of so many waiting requests, a little on the safe side; 0 while nothing is known.

        Args:
            jobs: requests.
            rows: of all of them together.
            size: of all of them together, as :meth:`edge.scheduling.batching.Joiner.size` counts it.
        """
        if not jobs:
            return 0.0
        if not self.max_rows:
            return jobs * self._waiting_seconds(size / jobs)
        runs, rest = divmod(rows, self.max_rows)
        each = size / rows
        return runs * self._waiting_seconds(self.max_rows * each) + (
            self._waiting_seconds(rest * each) if rest else 0.0
        )

    def _waiting_seconds(self, size: float) -> float:
        return self.latency.seconds(round(size), _WAITING_DEVIATIONS) or 0.0
