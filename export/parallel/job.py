"""A job, and how it ended."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from export.errors import JobError


class Job(NamedTuple):
    """A call that runs in a process of its own.

    Attributes:
        name: unique among the jobs that run together; a file name without a suffix.
        function: a function at the top level of a module. It writes its result to ``output`` whole or not at all, and
            what it prints goes to the log.
        arguments: of the function; pickled. Relative paths start at the working directory of the command.
        output: exists once the job is finished; a job whose output exists is not run.
    """

    name: str
    function: Callable[..., object]
    arguments: tuple[Any, ...]
    output: Path

    @property
    def call(self) -> bytes:
        """The function, by its name, and its arguments, as :mod:`export.parallel.child` reads them."""
        return pickle.dumps((self.function, self.arguments))


class Outcome(NamedTuple):
    """The end of a job: seconds, and the error of a failed one, which names its log."""

    job: Job
    seconds: float
    error: JobError | None = None
