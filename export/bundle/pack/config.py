"""Triton's ``config.pbtxt``: the fields that a bundle has a place for, and the names of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

from google.protobuf import text_format

from edge.errors import Raw, UsageError
from edge.pb import inference_pb2 as pb

#: Far above any configuration, and far below what takes long to parse.
_MOST_BYTES: Final = 256 * 1024
_FIX: Final = "Correct it; 'tritonserver --model-repository DIR' names each mistake, too."


class Config(NamedTuple):
    """A ``config.pbtxt``; ``unknown`` are the fields that :class:`edge.pb.inference_pb2.ModelConfig` lacks, by path."""

    message: pb.ModelConfig
    unknown: tuple[str, ...]


def read_config(path: Path) -> Config:
    """Return a configuration; raise a UsageError if it is too large, not UTF-8, or not of a model."""
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise UsageError(f"{path}", given=Raw(f"{size} bytes"), expected=f"at most {_MOST_BYTES}", fix=_FIX)
    try:
        text = path.read_bytes().decode()
        try:
            return Config(text_format.Parse(text, pb.ModelConfig()), ())
        except text_format.ParseError as first:
            # The parser takes no lists of messages where it skips unknown fields, and does not name these.
            known = _Known(text)
            if not known.without:
                raise first from None
            return Config(text_format.Parse(known.text, pb.ModelConfig()), tuple(known.without))
    except (OSError, UnicodeDecodeError, text_format.ParseError, RecursionError) as error:
        reason = f"{error.strerror if isinstance(error, OSError) else error}".removesuffix(".")
        expected = "Triton's configuration of a model as protobuf text"
        raise UsageError(f"{path}", given=Raw(reason), expected=expected, fix=_FIX) from None


class _Known:
    """Protobuf text with the fields alone that our message has, and the paths of those that are ``without`` a place."""

    def __init__(self, text: str) -> None:
        self.without: dict[str, None] = {}
        self._tokens, self._kept = text_format.Tokenizer(text.split("\n")), list[str]()
        self._fields(pb.ModelConfig.DESCRIPTOR, "")
        self._take(keep=True)  # nothing, or a bracket too many, which the parser refuses
        self.text = " ".join(self._kept)

    def _take(self, keep: bool) -> str:
        token: str = self._tokens.token
        if keep:
            self._kept.append(token)
        self._tokens.NextToken()
        return token

    def _fields(self, kind: Any, path: str) -> None:
        """Read fields up to a closing bracket; ``kind`` is the descriptor of their message, None of an unknown one."""
        while not self._tokens.AtEnd() and self._tokens.token not in ("}", ">"):
            name = self._tokens.token
            field = kind.fields_by_name.get(name) if kind else None
            if kind and not field:
                self.without[f"{path}{name}"] = None
            self._take(keep := field is not None)
            if self._tokens.token == ":":
                self._take(keep)
            self._value(field.message_type if field else None, f"{path}{name}.", keep)
            while self._tokens.token in (",", ";"):
                self._take(keep)

    def _value(self, kind: Any, path: str, keep: bool) -> None:
        begin = self._take(keep)
        if begin in ("{", "<"):
            self._fields(kind, path)
            self._take(keep)
        elif begin == "[":
            while not self._tokens.AtEnd() and self._tokens.token != "]":
                self._value(kind, path, keep)
                if self._tokens.token == ",":
                    self._take(keep)
            self._take(keep)
        elif begin == "-":
            self._take(keep)
        while begin.startswith(("'", '"')) and self._tokens.token.startswith(("'", '"')):
            self._take(keep)  # literals in a row are one
