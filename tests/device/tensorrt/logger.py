"""Loggers: the library's messages reach the program through them alone."""

from __future__ import annotations

from typing import Any

from .enums import Severity
from .versions import Native, instance


class ILogger(Native):
    """Base of a program's own logger."""

    Severity = Severity
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = Severity

    def __init__(self) -> None:
        object.__setattr__(self, "_constructed", True)

    # pybind11 keeps the attributes of Python subclasses.
    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def log(self, severity: Any, msg: str) -> None:
        raise RuntimeError('Tried to call pure virtual function "nvinfer1::ILogger::log"')


def checked(logger: Any) -> Any:
    """Return the logger, if its class and its constructor are right."""
    instance(logger, ILogger)
    if not getattr(logger, "_constructed", False):
        raise TypeError("tensorrt.ILogger.__init__() must be called when overriding __init__")
    return logger


class Log:
    """Writes to a logger in the words of TensorRT."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def error(self, function: str, code: int, kind: str, reason: str) -> None:
        self.logger.log(Severity.ERROR, f"{function}: Error Code {code}: {kind} ({reason})")

    def usage(self, function: str, reason: str) -> None:
        self.error(function, 3, "API Usage Error", f"Parameter check failed, {reason}")

    def cuda(self, function: str, reason: str) -> None:
        self.error(function, 1, "Cuda Runtime", reason)

    def warning(self, message: str) -> None:
        self.logger.log(Severity.WARNING, message)
