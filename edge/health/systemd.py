"""Notifications by systemd's protocol: one datagram for each message, to the socket ``NOTIFY_SOCKET``."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

log = logging.getLogger(__name__)


class Notifier:
    """Sends notifications, or nothing without ``NOTIFY_SOCKET``. An error is logged once, and nothing is sent again.

    Attributes:
        watchdog_seconds: time without a ping after which systemd ends this process; None if it does not.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # An abstract socket begins with NUL, for which systemd writes @ in the environment.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        interval = environment.get("WATCHDOG_USEC", "")
        is_addressed = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        microseconds = int(interval) if address and is_addressed and interval.isascii() and interval.isdecimal() else 0
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
