"""Systemd's notification protocol: one datagram for each message, to the socket that ``NOTIFY_SOCKET`` names.

Container engines and other supervisors understand it too. Without ``NOTIFY_SOCKET`` nothing is sent.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

log = logging.getLogger(__name__)


class Notifier:
    """Sends notifications. A socket that does not exist is logged once and not tried again.

    Args:
        environment: holds ``NOTIFY_SOCKET``, ``WATCHDOG_USEC`` and ``WATCHDOG_PID``.

    Attributes:
        watchdog_seconds: without a ping for so long, systemd ends this process; None if it does not.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # Names of abstract sockets begin with NUL, which no environment variable can hold, so systemd writes @.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.watchdog_seconds = _watchdog_seconds(environment) if address else None

    def notify(self, **fields: str | int) -> None:
        """Send assignments, for example ``READY=1``; line feeds within a value become spaces."""
        if not self._address:
            return
        message = "\n".join(f"{name}={' '.join(str(value).splitlines())}" for name, value in fields.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)  # a supervisor that does not read must not block the server
                sender.sendto(message.encode(), self._address)
        except BlockingIOError:
            log.warning("the supervisor does not read its notifications")
        except OSError as error:
            log.warning("the supervisor cannot be notified at NOTIFY_SOCKET, nor will it be tried again: %s", error)
            self._address = ""


def _watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    """Return systemd's watchdog interval; None without one, or if it is that of the process that started this one."""
    text = environment.get("WATCHDOG_USEC", "")
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    microseconds = int(text) if text.isascii() and text.isdecimal() else 0
    return microseconds / 1e6 or None
