"""The thread that ends the process when nothing else helps: a run is stuck, the device is lost, a shutdown hangs.

It is a thread, and not a task of the event loop, because the event loop may be what hangs.
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
#: What waited when the device was lost is refused at once; the refusals have to reach their clients still.
_REFUSALS_SECONDS = 2.0


class Watchdog:
    """Looks at the health of the server, and ends the process if that is all that helps.

    Args:
        health: what it looks at.
        stuck_exit_seconds: how long a run that is stuck is waited for.
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
        """End the process in so many seconds, unless :meth:`close` comes first."""
        self._end_after, self._end_at = seconds, time.monotonic() + seconds

    def close(self) -> None:
        """Stop looking."""
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
                _give_up(error)

    def _failure(self) -> FewheadsError | None:
        try:
            return self._health.failure(self._stuck_exit_seconds)
        except Exception:  # nobody watches the watchdog
            log.exception("the watchdog cannot look")
            return None


def _give_up(error: FewheadsError) -> NoReturn:
    """Write where every thread is, then end the process at once: what is stuck would hold an orderly end for ever."""
    sys.stdout.flush()
    faulthandler.dump_traceback(sys.stderr)
    print(f"fewheads: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)
