"""Thread that ends the process when a run is stuck, the device is lost or a shutdown hangs.

It is not a task of the event loop, because the event loop may hang too.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import sys
import threading
import time
from typing import NoReturn

from edge.errors import DeviceFailed, FewheadsError
from edge.health.health import Health

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25
#: Time for the refusals of the requests that waited when the device was lost to reach their clients.
_REFUSALS_SECONDS = 2.0


class Watchdog:
    """Looks at the health of the server four times a second, and ends the process if only a restart helps.

    Args:
        health: of the server and its models.
        stuck_exit_seconds: how much longer than its limit a run may take.
    """

    def __init__(self, health: Health, stuck_exit_seconds: float) -> None:
        self._health = health
        self._stuck_exit_seconds = stuck_exit_seconds
        self._end_at = math.inf
        self._end_after = math.inf
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def bound_shutdown(self, seconds: float) -> None:
        """End the process in ``seconds``, unless :meth:`close` is called before."""
        self._end_after, self._end_at = seconds, time.monotonic() + seconds

    def close(self) -> None:
        """Stop watching."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(_LOOK_SECONDS):
            error = self._failure()
            if isinstance(error, DeviceFailed) and self._stopped.wait(_REFUSALS_SECONDS):
                return
            if error is None and time.monotonic() > self._end_at:
                error = self._health.drain_timeout(self._end_after)
            if error:
                _exit(error)

    def _failure(self) -> FewheadsError | None:
        try:
            return self._health.failure(self._stuck_exit_seconds)
        except Exception:  # the thread has to go on
            log.exception("the watchdog cannot read the health")
            return None


def _exit(error: FewheadsError) -> NoReturn:
    """Write the stack of every thread, then end the process at once, because a stuck run would block an orderly end."""
    sys.stdout.flush()
    faulthandler.dump_traceback(sys.stderr)
    print(f"fewheads: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)
