"""The packages of TensorRT. The only module that imports ``tensorrt`` or ``tensorrt_rtx``, inside its functions."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Literal

from edge.errors import BackendError, Literally

log = logging.getLogger(__name__)

Flavor = Literal["tensorrt", "tensorrt_rtx"]

_INSTALL = {
    "tensorrt": "Install JetPack's python3-libnvinfer; a wheel from an index does not support the Orin's GPU.",
    "tensorrt_rtx": "Install the extra 'rtx' on an x86-64 machine.",
}
_KEPT_MESSAGES = 20


def version(flavor: Flavor) -> str:
    """Return the version of TensorRT.

    Raises:
        BackendError: it is not installed.
    """
    return str(import_tensorrt(flavor).__version__)


def import_tensorrt(flavor: Flavor) -> Any:
    """Import TensorRT, with an error that says how to get it.

    Raises:
        BackendError: it is not installed.
    """
    try:
        return import_module(flavor)
    except ImportError as error:
        raise BackendError(
            flavor, given=Literally(error), expected="an importable package", fix=_INSTALL[flavor]
        ) from None


@cache
def logger_of(flavor: Flavor) -> Any:
    """Return the one logger of this process: TensorRT keeps the first that it is given and ignores any other.

    Its ``messages`` are the last warnings and errors; its ``listener``, where it has one, gets all of them, and returns
    True for those that the log is not to show.
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
