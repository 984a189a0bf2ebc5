"""Interface of programs that compute requests step by step, with others that join and leave between two steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from edge.datatypes import Array
from edge.errors import RunnerError
from edge.programs.program import Computed, LoopLimits, Options, Program

T = TypeVar("T")


class Joining(NamedTuple):
    """A request that joins a session: its key in the session, and the arguments of :meth:`Program.compute`."""

    key: object
    inputs: Mapping[str, Array]
    options: Options


class Finished(NamedTuple):
    """A request whose last row has ended, or that failed alone: its key, and its result so far."""

    key: object
    computed: Computed
    error: RunnerError | None = None  # of the first row that failed


class Session(Protocol):
    """The requests in progress on one runner. One thread uses it."""

    @property
    def rows(self) -> int:
        """The number of rows in progress."""

    def add(self, requests: Sequence[Joining]) -> list[Finished]:
        """Add the rows of all requests, whose inputs have equal shapes apart from the number of rows.

        Return those that have ended already. If this raises, as :meth:`edge.runner.Runner.infer` does, none is added.
        """

    def step(self) -> list[Finished]:
        """Compute one step of all rows, and return the requests that it finished; raise as :meth:`add`."""

    def partial(self, key: object, stopped: str = "") -> Computed | None:
        """Return the outputs so far of a request in progress; None if it needs a step for its first ones.

        ``stopped`` is the reason to report for the rows that have not ended.
        """

    def drop(self, key: object) -> None:
        """Drop the rows of a request, if it is in progress."""


def close_gaps(rows: list[T], leaving: Sequence[int]) -> list[tuple[int, int]]:
    """Remove the rows at some places, in ascending order, and move others from the end into the gaps.

    Return the moves, from the old place of a row to the new one, for :meth:`edge.runner.DeviceLoop.keep`.
    """
    left = len(rows) - len(leaving)
    staying = sorted({*range(left, len(rows))}.difference(leaving))
    moves = list(zip(staying, leaving, strict=False))  # as many rows stay at the end as there are gaps
    for source, target in moves:
        rows[target] = rows[source]
    del rows[left:]
    return moves


class IterativeProgram(Program):
    """A program of sessions, in which requests are batched continuously.

    Attributes:
        limits: of requests that set none.
        loops_per_step: loops that one step of a session computes.
        generates: whether rows are texts. The run in which a row joins and each step give it one token, so the time of
            a step grows with the rows; that of a loop also with the size of their inputs.
    """

    limits: LoopLimits
    loops_per_step = 1
    generates = False

    def compute(self, inputs: Mapping[str, Array], options: Options) -> Computed:
        """Compute one request in a session of its own, until the last of its rows has ended."""
        session = self.session(options)
        ended = session.add([Joining(None, inputs, options)])
        while not ended:
            ended = session.step()
        (finished,) = ended
        if finished.error:
            raise finished.error
        return finished.computed

    @abstractmethod
    def session(self, options: Options) -> Session:
        """Return a session without rows."""
