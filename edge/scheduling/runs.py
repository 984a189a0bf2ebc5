"""What the workers compute at this moment, and what became of the device: written by them, read by the watchdog."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from edge.datatypes import Array
from edge.errors import Literally, ModelNotReady
from edge.runtimes.device_errors import fatal
from edge.scheduling.lane import Computed, Lane

log = logging.getLogger(__name__)


class Run(NamedTuple):
    """A run that has not ended: since when, by ``time.monotonic()``, of which tier, and of what size."""

    begun: float
    lane: Lane
    size: int


class Runs:
    """Computes runs for the workers, and knows of each what it is at.

    Args:
        workers: how many there are.

    Attributes:
        now: the run of each worker, None where it has none.
        lost: why nothing can be computed any more; empty while that is not so. It stays: only a new process helps.
        on_lost: called once, on the thread that lost the device.
    """

    def __init__(self, workers: int) -> None:
        self.now: list[Run | None] = [None] * workers
        self.lost = ""
        self.on_lost: Callable[[], None] = lambda: None

    def compute(
        self, lane: Lane, worker: int, inputs: Mapping[str, Array], size: int, *, alone: bool = True
    ) -> Computed | BaseException:
        """Run a tier; whatever goes wrong is returned, so that its own request gets it and the thread lives on.

        Args:
            lane: the tier.
            worker: who computes it, counted from 0.
            inputs: of the graph.
            size: of them, as the lane's joiner counts it.
            alone: whether a failure counts against the tier. That of several requests together does not: each is
                repeated alone.
        """
        if self.lost:
            return self.refusal()
        self.now[worker] = Run(time.monotonic(), lane, size)
        try:
            computed = lane.compute(inputs)
        except BaseException as error:
            if alone:
                lane.record.failed(error)
            if lane.on_gpu:
                self.check(error)
            return error
        finally:
            self.now[worker] = None
        lane.record.succeeded()
        return computed

    def check(self, error: BaseException) -> None:
        """Find out whether an error of a GPU's runtime means that the device is lost."""
        text = fatal(error)
        if text:
            self.lose(text)

    def lose(self, reason: str) -> None:
        """Note that nothing can be computed any more."""
        if not self.lost:
            log.critical("nothing can be computed any more: %s", reason)
            self.lost = reason
            self.on_lost()

    def refusal(self) -> ModelNotReady:
        """Return the error of requests that find the device lost."""
        fix = "Ask another server; this one ends, so that its supervisor can start it again."
        return ModelNotReady("server", given=Literally(self.lost), expected="a device that computes", fix=fix)
