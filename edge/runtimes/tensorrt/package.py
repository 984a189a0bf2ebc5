"""TensorRT's packages and their log. The only module that imports ``tensorrt`` or ``tensorrt_rtx``, in a function."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Literal

from edge.errors import BackendError, Raw

log = logging.getLogger(__name__)

Flavor = Literal["tensorrt", "tensorrt_rtx"]

_INSTALL = {
    "tensorrt": "Install JetPack's python3-libnvinfer; a wheel from an index does not support the Orin's GPU.",
    "tensorrt_rtx": "Install the extra 'rtx' on an x86-64 machine.",
}
_KEPT_MESSAGES = 20
#: TensorRT logs two warnings for each kernel: "Tactic Device request: 4229MB Available: 2658MB. Device memory is
#: insufficient to use tactic." and "Skipping tactic 0 due to insufficient memory on requested size of …".
_REQUESTED = re.compile(r"Tactic Device request: (\d+) ?MB", re.IGNORECASE)
_SKIPPED = re.compile(r"Skipping tactic \S+ due to (?:insufficient memory|oom)", re.IGNORECASE)
_OUT_OF_MEMORY = re.compile(
    r"out ?of ?memory|insufficient (?:memory|workspace)|cannot allocate memory|NvMapMemAlloc\w* *:? *\d+ error 12",
    re.IGNORECASE,
)


def version(flavor: Flavor) -> str:
    """Return the version of a package; raise a BackendError if it is not installed."""
    return str(import_tensorrt(flavor).__version__)


def import_tensorrt(flavor: Flavor) -> Any:
    """Import a package; raise a BackendError that says how to install it if it is not."""
    try:
        return import_module(flavor)
    except ImportError as error:
        given, fix = Raw(error), _INSTALL[flavor]
        raise BackendError(flavor, given=given, expected="an importable package", fix=fix) from None


@cache
def logger_of(flavor: Flavor) -> Any:
    """Return the one logger of this process: TensorRT keeps the first logger that it gets and ignores all others.

    Its ``messages`` are the last warnings and errors. Its ``listener``, if set, gets all of them; those for which it
    returns True are logged at DEBUG only.
    """
    trt: Any = import_tensorrt(flavor)
    levels = {
        trt.ILogger.INTERNAL_ERROR: logging.ERROR,
        trt.ILogger.ERROR: logging.ERROR,
        trt.ILogger.WARNING: logging.WARNING,
    }

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.messages: deque[str] = deque(maxlen=_KEPT_MESSAGES)
            self.listener: Callable[[str], bool] | None = None

        def log(self, severity: Any, message: str) -> None:
            level = levels.get(severity, logging.DEBUG)
            if level > logging.DEBUG:
                self.messages.append(message)
                if self.listener and self.listener(message):
                    level = logging.DEBUG
            log.log(level, "%s: %s", flavor, message)

    return Logger()


def skips_a_tactic(message: str) -> bool:
    """Return whether a warning of the builder reports a kernel that it skipped for lack of memory."""
    return bool(_REQUESTED.search(message) or _SKIPPED.search(message))


class BuilderLog:
    """Counts the builder's warnings about memory. Its ``hear`` is the listener of the logger."""

    def __init__(self) -> None:
        self.out_of_memory = ""  # the last message that reports a build without memory
        self._skipped = 0
        self._requested_mib: list[int] = []

    @property
    def skipped_tactics(self) -> int:
        """The number of kernels that the builder skipped for lack of memory."""
        return max(self._skipped, len(self._requested_mib))

    def hear(self, message: str) -> bool:
        """Read a warning or error of the builder; return whether :meth:`warning` covers it."""
        requested = _REQUESTED.search(message)
        if requested:
            self._requested_mib.append(int(requested[1]))
        elif _SKIPPED.search(message):
            self._skipped += 1
        elif _OUT_OF_MEMORY.search(message):
            self.out_of_memory = message
        return skips_a_tactic(message)

    def warning(self) -> str:
        """Return a warning for people; empty if no kernel was skipped."""
        if not self.skipped_tactics:
            return ""
        sizes = f" of up to {max(self._requested_mib):,} MiB each" if self._requested_mib else ""
        return (
            f"{self.skipped_tactics} tactics were skipped for lack of memory{sizes}, so the engine may be slower than "
            "it could be; stop other programs or raise --workspace-mib, and build it again with --replace"
        )
