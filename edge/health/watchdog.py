"""Thread, independent of the event loop, that ends a process whose run is stuck, device is lost or shutdown hangs."""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import sys
import threading
import time
from typing import NoReturn

from edge.errors import DeviceFailed, DrainTimeout, FewheadsError
from edge.health.health import Health

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25
#: Time for waiting requests to be rejected after the device is lost.
_REFUSALS_SECONDS = 2.0


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
