"""Files of an unfinished run, beside its directory."""

from __future__ import annotations

from pathlib import Path

from export.training.log import TrainingLog
from export.training.runs import LOG


class RunFiles:
    """State and log of a run until it is finished: ``.NAME.state`` and ``.NAME.log.jsonl`` beside the directory NAME.

    Args:
        tensorboard: a directory for the log as TensorBoard's events, too; the run's are in its subdirectory NAME.

    Raises:
        UsageError: TensorBoard is not installed.
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
