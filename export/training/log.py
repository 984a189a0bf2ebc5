"""The log of a training: ``log.jsonl``, and TensorBoard's events if wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from edge.errors import Raw, UsageError
from export.training.runs import LOG


class TrainingLog:
    """Lines with a step and numbers by name, in a file, of which a resumed run keeps those before its step.

    Args:
        path: of the file.
        tensorboard: a directory for the same numbers as TensorBoard's events.

    Raises:
        UsageError: TensorBoard is not installed.
    """

    def __init__(self, path: Path, tensorboard: Path | None = None) -> None:
        self.path = path
        self._events: Any = None if tensorboard is None else _event_writer(tensorboard)

    def resume(self, step: int) -> None:
        """Drop the lines after a step; at step 0, the file starts anew."""
        lines = self.path.read_bytes().splitlines() if step and self.path.exists() else []
        kept = [line + b"\n" for line in lines if msgspec.json.decode(line)["step"] <= step]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(b"".join(kept))

    def write(self, step: int, **numbers: float | str) -> None:
        """Append a line."""
        with open(self.path, "ab") as file:
            file.write(msgspec.json.encode({"step": step, **numbers}) + b"\n")
        if self._events is not None:
            for name, number in numbers.items():
                if not isinstance(number, str):
                    self._events.add_scalar(name, number, step)
            self._events.flush()


def _event_writer(directory: Path) -> object:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        given, expected = Raw(directory), "the package tensorboard"
        fix = "Install it with pip install tensorboard, or leave --tensorboard out: log.jsonl has the same numbers."
        raise UsageError("--tensorboard", given=given, expected=expected, fix=fix) from None
    return SummaryWriter(str(directory))


class RunFiles:
    """State and log of a run until it is finished: ``.NAME.state`` and ``.NAME.log.jsonl`` beside the directory NAME.

    Args:
        tensorboard: a directory for the log as TensorBoard's events, too, in its subdirectory NAME.
    """

    def __init__(self, directory: Path, tensorboard: Path | None = None) -> None:
        self.state = directory.with_name(f".{directory.name}.state")
        events = tensorboard and tensorboard / directory.name
        self.log = TrainingLog(directory.with_name(f".{directory.name}.{LOG}"), events)

    def finished(self) -> dict[str, bytes]:
        """Return the log as a file of the finished run; nothing if it was not trained."""
        return {LOG: self.log.path.read_bytes()} if self.log.path.exists() else {}

    def remove(self) -> None:
        """Delete both files."""
        self.state.unlink(missing_ok=True)
        self.log.path.unlink(missing_ok=True)
