"""The server's log, and changes of its settings at run time."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Final, NamedTuple

import msgspec

from edge.errors import InvalidRequest, Raw, Unsupported, elided, printable

log = logging.getLogger(__name__)

_UTC = "%Y-%m-%dT%H:%M:%SZ"
#: Triton's names of the formats, and ``json``: one object per line. All but the default are in UTC.
FORMATS: Final = {"default": None, "ISO8601": _UTC, "json": _UTC}
LEVELS: Final = ("debug", "info", "warning", "error")
Setting = bool | int | str
#: grpcio logs this as an error with a traceback when a client disconnects during its call. The server is not at fault,
#: and any client could fill the disk with it.
_CORE: Final = "grpc._cython.cygrpc"
_CLIENT_DISCONNECTED: Final = "ExecuteBatchError raised in core"
#: The most characters of a message, of the name of a model or request, and of a traceback.
_MOST_MESSAGE_CHARS, _MOST_NAME_CHARS, _MOST_TRACEBACK_CHARS = 4000, 200, 16_000
_LOGGERS: Final = (logging.getLogger(), logging.getLogger("edge"))


class About(NamedTuple):
    """The request that a message is about; its id may be empty."""

    model: str
    request_id: str


#: Set for each request, and inherited by all of its tasks.
ABOUT: ContextVar[About | None] = ContextVar("about", default=None)


class Logs:
    """Logging to stderr, with Triton's settings.

    - ``log_info``, ``log_warning``, ``log_error`` (bool): whether messages of that level are written.
    - ``log_verbose_level`` (int): 0 writes no debug messages, 1 those of this program, which include each refused
      request, and 2 or more those of its libraries too.
    - ``log_format`` (str): a name in :data:`FORMATS`.
    - ``log_file`` (str): always empty, for stderr.

    A message about a request names its model and its id. ``level`` is the lowest that is written.
    """

    def __init__(self, level: str = "info", log_format: str = "default") -> None:
        rank = LEVELS.index(level)
        self._settings: dict[str, Setting] = {
            "log_file": "",
            "log_info": rank <= 1,
            "log_warning": rank <= 2,
            "log_error": True,
            "log_verbose_level": 0 if rank else 2,
            "log_format": log_format,
        }
        self._levels_before = {logger: logger.level for logger in _LOGGERS}
        self._handler = logging.StreamHandler()
        self._handler.addFilter(self._is_wanted)
        logging.getLogger().addHandler(self._handler)
        self._apply()

    @property
    def settings(self) -> dict[str, Setting]:
        return dict(self._settings)

    def change(self, settings: Mapping[str, object]) -> None:
        """Change some settings, or none if one is unknown or wrong (InvalidRequest), or a log file (Unsupported)."""
        self._settings |= {name: self._checked(name, value) for name, value in settings.items()}
        self._apply()

    def close(self) -> None:
        """Stop writing, and restore the loggers."""
        logging.getLogger().removeHandler(self._handler)
        for logger, level in self._levels_before.items():
            logger.setLevel(level)

    def _checked(self, name: str, value: object) -> Setting:
        subject = f"log setting {name!r}"
        if name not in self._settings:
            expected = f"one of {', '.join(self._settings)}"
            raise InvalidRequest("log setting", given=name, expected=expected, fix="Choose one of these.")
        kind = type(self._settings[name])
        if type(value) is not kind or not isinstance(value, bool | int | str):  # a bool is also an int
            given = Raw("no value") if value is None else value
            raise InvalidRequest(subject, given=given, expected=f"a value of type {kind.__name__}", fix="Send one.")
        if name == "log_file" and value:
            fix = "Redirect the server's stderr where it is started."
            raise Unsupported(subject, given=value, expected="nothing: the log goes to stderr", fix=fix)
        if name == "log_format" and value not in FORMATS:
            raise InvalidRequest(subject, given=value, expected=f"one of {', '.join(FORMATS)}", fix="Choose one.")
        return value

    def _is_wanted(self, record: logging.LogRecord) -> bool:
        if record.name == _CORE and str(record.msg).startswith(_CLIENT_DISCONNECTED):
            return int(self._settings["log_verbose_level"]) > 1
        if record.levelno < logging.INFO:
            return True  # the loggers' levels filter these, which costs less
        if record.levelno < logging.WARNING:
            return bool(self._settings["log_info"])
        return bool(self._settings["log_warning" if record.levelno < logging.ERROR else "log_error"])

    def _apply(self) -> None:
        verbose = int(self._settings["log_verbose_level"])
        root, program = _LOGGERS
        root.setLevel(logging.DEBUG if verbose > 1 else logging.INFO)
        program.setLevel(logging.DEBUG if verbose else logging.NOTSET)
        name = str(self._settings["log_format"])
        formatter = (_Json if name == "json" else _Text)(datefmt=FORMATS[name])
        if FORMATS[name]:
            formatter.converter = time.gmtime
        self._handler.setFormatter(formatter)


class _Text(logging.Formatter):
    """A line for people. Text of clients can forge no other line, and nothing that a terminal obeys."""

    def format(self, record: logging.LogRecord) -> str:
        about = ABOUT.get()
        line = f"{self.formatTime(record, self.datefmt)} {record.levelname} {record.name}: {_message(record)}"
        if about:
            line += f" [model {_name(about.model)!r}, request {_name(about.request_id)!r}]"
        # Indented, because the text of an exception may have lines that look like those of a log.
        return "\n  ".join([line, *_traceback(self, record).splitlines()])


class _Json(logging.Formatter):
    """A line for programs."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": f"{self.formatTime(record, self.datefmt)[:-1]}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        about = ABOUT.get()
        if about:
            line |= {"model": _name(about.model), "request_id": _name(about.request_id)}
        if record.exc_info:
            line["exception"] = _traceback(self, record)
        return msgspec.json.encode(line).decode()


def _message(record: logging.LogRecord) -> str:
    return printable(elided(record.getMessage(), _MOST_MESSAGE_CHARS))


def _name(text: str) -> str:
    return elided(text, _MOST_NAME_CHARS)


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    text = formatter.formatException(record.exc_info) if record.exc_info else ""
    return printable(elided(text, _MOST_TRACEBACK_CHARS), keep="\n")


class NonfiniteWarnings:
    """Warns of responses with a NaN or an infinity: FP16 overflowed, an engine is broken, or the input is odd.

    There is one warning in ``seconds`` for each model, because one bad engine can spoil thousands of responses.
    """

    def __init__(self, seconds: float = 60.0) -> None:
        self._seconds = seconds
        self._warned_at: dict[str, float] = {}
        self._unreported: dict[str, int] = {}

    def warn(self, model: str, tier: str, names: Sequence[str]) -> None:
        """Warn of one response whose outputs ``names`` have such a value, or count it for the next warning."""
        now = time.monotonic()
        if now < self._warned_at.get(model, now):
            self._unreported[model] = self._unreported.get(model, 0) + 1
            return
        self._warned_at[model] = now + self._seconds
        others = self._unreported.pop(model, 0)
        also = f", and in {others} responses before" if others else ""
        log.warning("NaN or infinity in %s of model %r, tier %r%s", ", ".join(names), model, tier, also)
