"""Answers of a job: the final one, and those so far while it is in progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from edge.datatypes import Array

#: Partial answers that may wait for their reader. A further one replaces the oldest, so a slow reader delays nobody.
MOST_WAITING: Final = 8


class Answer(NamedTuple):
    """One job's rows of the graph's outputs and of the program's facts, by name."""

    outputs: dict[str, Array]
    facts: Mapping[str, Array]  # [rows] each
    nonfinite: tuple[str, ...] = ()  # names of the outputs that contain a NaN or an infinity


class PartialAnswers:
    """The latest partial answers of one job, from the worker that computes it to one reader on another thread."""

    def __init__(self) -> None:
        self._answers: deque[Answer] = deque(maxlen=MOST_WAITING)
        self._told = False

    def put(self, answer: Answer) -> bool:
        """Add an answer; return whether to tell the reader, who then takes answers until there is none."""
        self._answers.append(answer)
        told, self._told = self._told, True
        return not told

    def take(self) -> Answer | None:
        """Return the oldest answer that waits; None without one."""
        if not self._answers:
            self._told = False
            if not self._answers:  # the worker may have put one before it could see that
                return None
        return self._answers.popleft()
