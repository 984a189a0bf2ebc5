"""Latency table of one device: the time of each shape of a layer, relative to the dense layer.

The key of a table is the runtime, precision, device, power mode and model of its times. Tables with different keys are
never mixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, Protocol, TypeVar

import msgspec

from edge.errors import Raw, UsageError, Whole
from edge.files import write_result

Label = Literal["measured", "prediction, not measured on an Orin"]
#: Label of every number that was not measured on a board.
PREDICTION: Final = "prediction, not measured on an Orin"

T = TypeVar("T")


def read_json(path: Path, kind: type[T], *, subject: str, expected: str, fix: str, prefix: str = "") -> T:
    """Return the contents of a file; raise a UsageError if it cannot be read or is malformed."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        given = Raw(f"{prefix}{error.strerror if isinstance(error, OSError) else error}")
        raise UsageError(subject, given=given, expected=expected, fix=fix) from None


class _Sizes(Protocol):
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn_dim(self) -> int: ...


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of a layer that its time depends on."""

    num_heads: int  # 0 for no attention
    head_dim: int  # features of a query, key and value in one head
    ffn_dim: int  # hidden units; 0 for no feed-forward

    @classmethod
    def of(cls, shape: _Sizes) -> Shape:
        """Return the sizes of any object that has them."""
        return cls(shape.num_heads, shape.head_dim if shape.num_heads else 0, shape.ffn_dim)

    @property
    def name(self) -> str:
        """The shape in a file name, such as ``h6-r32-f768``."""
        return f"h{self.num_heads}-r{self.head_dim}-f{self.ffn_dim}"


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Median times of a call of two models, timed in turns."""

    milliseconds: float
    dense_milliseconds: float  # of the model it is compared with
    ratio: float  # speed-up; where floor_milliseconds is not 0, of the times above that
    calls: int  # of each; 0 for a prediction
    floor_milliseconds: float = 0.0  # of a model that only copies its input


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One shape at one length, compared with the dense layer."""

    shape: Shape
    tokens: int  # of each input of a call
    comparison: Comparison
    throttled: bool = False  # the device reported throttling during the calls
    batch: int = 1  # inputs of a call


class Rest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Embeddings and task head at one length: the median time of a call, also in units of a dense layer's."""

    tokens: int
    milliseconds: float
    dense_layers: float
    throttled: bool = False
    batch: int = 1


class LayerLatencies(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latencies of the layers of one kind of model on one device."""

    key: dict[str, str]  # the conditions of the times, by name
    timings: tuple[Timing, ...] = ()
    rest: tuple[Rest, ...] = ()
    label: Label = "measured"
    format_version: Literal[1] = 1

    @classmethod
    def read(cls, path: Path) -> LayerLatencies:
        """Read a table; raise a UsageError if the file cannot be read, or is not a table."""
        expected = "a latency table of format version 1"
        fix = "Give a file that 'fewheads profile' wrote."
        return read_json(path, cls, subject=f"latency table {path}", expected=expected, fix=fix)

    def write(self, path: Path) -> None:
        """Write the table, as :func:`edge.files.write_result`."""
        write_result(path, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    def find(self, shape: _Sizes, tokens: int, batch: int = 1) -> Comparison | None:
        """Return the comparison of a shape at a length and a batch, or None."""
        sizes = Shape.of(shape)
        matching = (t.comparison for t in self.timings if (t.shape, t.tokens, t.batch) == (sizes, tokens, batch))
        return next(matching, None)

    def find_rest(self, tokens: int, batch: int = 1) -> Rest | None:
        """Return embeddings and task head at a length and a batch, or None."""
        return next((rest for rest in self.rest if (rest.tokens, rest.batch) == (tokens, batch)), None)

    @property
    def name(self) -> str:
        """The device, power mode, runtime and precision, for people."""
        names = ("device", "power_mode", "runtime", "runtime_version", "precision")
        words = [self.key[name] for name in names if self.key.get(name)]
        return " ".join(words or list(self.key.values())[:1])


def check_key(subject: str, found: Mapping[str, str], expected: Mapping[str, str], fix: str) -> None:
    """Raise a UsageError with both values of every name in ``expected`` for which the key of a table differs."""
    differences = [name for name, value in expected.items() if found.get(name) != value]
    if differences:
        given = Whole(", ".join(f"{name} {found.get(name, 'missing')!r}" for name in differences))
        wanted = ", ".join(f"{name} {expected[name]!r}" for name in differences)
        raise UsageError(f"{subject} key", given=given, expected=wanted, fix=fix)
