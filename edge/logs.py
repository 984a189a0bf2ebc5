"""What the server logs, and how that is changed while it runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Final

from edge.errors import InvalidRequest, Literally, Unsupported

_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
#: Triton's names of the formats. ISO 8601 is in UTC.
FORMATS: Final = {"default": None, "ISO8601": "%Y-%m-%dT%H:%M:%SZ"}
LEVELS: Final = ("debug", "info", "warning", "error")
Setting = bool | int | str
_LOGGERS: Final = (logging.getLogger(), logging.getLogger("edge"))


class Logs:
    """Logging to stderr, with Triton's settings.

    - ``log_info``, ``log_warnings``, ``log_errors`` (bool): whether messages of that level are written.
    - ``log_verbose_level`` (int): 0 writes no debug messages, 1 those of this program, which tell each refused
      request; 2 and more those of its libraries too.
    - ``log_format`` (str): a name in :data:`FORMATS`.
    - ``log_file`` (str): always empty, for stderr.

    Args:
        level: the least level that is written, one of :data:`LEVELS`.
    """

    def __init__(self, level: str = "info") -> None:
        rank = LEVELS.index(level)
        self._settings: dict[str, Setting] = {
            "log_file": "",
            "log_info": rank <= 1,
            "log_warnings": rank <= 2,
            "log_errors": True,
            "log_verbose_level": 0 if rank else 2,
            "log_format": "default",
        }
        self._levels_before = {logger: logger.level for logger in _LOGGERS}
        self._handler = logging.StreamHandler()
        self._handler.addFilter(self._is_wanted)
        logging.getLogger().addHandler(self._handler)
        self._apply()

    @property
    def settings(self) -> dict[str, Setting]:
        """All settings as they are now."""
        return dict(self._settings)

    def change(self, settings: Mapping[str, object]) -> None:
        """Change some settings; when one of them is wrong, none is changed.

        Raises:
            InvalidRequest: there is no such setting, or it cannot have such a value.
            Unsupported: another log file, which no client may choose.
        """
        new = dict(self._settings)
        for name, value in settings.items():
            new[name] = self._checked(name, value)
        self._settings = new
        self._apply()

    def close(self) -> None:
        """Stop writing, and leave the loggers as they were."""
        logging.getLogger().removeHandler(self._handler)
        for logger, level in self._levels_before.items():
            logger.setLevel(level)

    def _checked(self, name: str, value: object) -> Setting:
        subject = f"log setting {name!r}"
        if name not in self._settings:
            expected = f"one of {', '.join(self._settings)}"
            raise InvalidRequest("log setting", given=name, expected=expected, fix="Choose one of these.")
        kind = type(self._settings[name])
        if type(value) is not kind:  # a bool is no level, although Python takes it for an int
            given = Literally("no value") if value is None else value
            raise InvalidRequest(subject, given=given, expected=f"a value of type {kind.__name__}", fix="Send one.")
        assert isinstance(value, bool | int | str)
        if name == "log_file" and value:
            fix = "Redirect the server's stderr where it is started."
            raise Unsupported(subject, given=value, expected="nothing: the log goes to stderr", fix=fix)
        if name == "log_format" and value not in FORMATS:
            raise InvalidRequest(subject, given=value, expected=f"one of {', '.join(FORMATS)}", fix="Choose one.")
        return value

    def _is_wanted(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO:
            return True  # the loggers' levels decide these, so that nobody pays for what is not written
        if record.levelno < logging.WARNING:
            return bool(self._settings["log_info"])
        return bool(self._settings["log_warnings" if record.levelno < logging.ERROR else "log_errors"])

    def _apply(self) -> None:
        verbose = int(self._settings["log_verbose_level"])
        everything, ours = _LOGGERS
        everything.setLevel(logging.DEBUG if verbose > 1 else logging.INFO)
        ours.setLevel(logging.DEBUG if verbose else logging.NOTSET)
        date_format = FORMATS[str(self._settings["log_format"])]
        formatter = logging.Formatter(_LINE, date_format)
        if date_format:
            formatter.converter = time.gmtime
        self._handler.setFormatter(formatter)
