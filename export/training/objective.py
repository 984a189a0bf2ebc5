"""The interfaces of a training: what is learnt, and what receives reports while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

# torch takes seconds to import, and what shows a training is made before it.
if TYPE_CHECKING:
    from torch import Tensor, nn


class Step(msgspec.Struct, frozen=True):
    """Position of a run: step, number of steps, loss of the step, and estimated seconds to the end."""

    number: int
    steps: int
    loss: float
    seconds_left: float


class Epoch(msgspec.Struct, frozen=True):
    """A finished epoch: its number from 1, and its score."""

    number: int
    score: EpochScore


class Observer:
    """Ignores every report; a subclass overrides those that it is for."""

    def on_resume(self, step: int, steps: int) -> None:
        """Accept that an interrupted run resumes after ``step`` of ``steps``."""

    def on_step(self, step: Step) -> None:
        """Accept the position of the run, after each step or some."""

    def on_epoch(self, epoch: Epoch) -> None:
        """Accept the score of a finished epoch."""


SILENT = Observer()


class EpochScore(msgspec.Struct, frozen=True):
    """Evaluation of a model after an epoch.

    Attributes:
        value: decides which epoch is kept; more is better.
        name: of the value as it is printed, such as ``accuracy``.
        printed: what a person reads; the value itself if None. An error that is negated in ``value`` is positive here.
    """

    value: float
    name: str
    printed: float | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.value if self.printed is None else self.printed:.4g}"


class Objective(Protocol):
    """What a training learns: a model, its data, its loss, and the score that chooses the best epoch.

    Batches depend on their position alone, so that an interrupted run resumes with the same ones.
    """

    @property
    def model(self) -> nn.Module:
        """The model, which is trained in place."""

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches of every epoch."""

    @property
    def rates(self) -> Mapping[nn.Parameter, float]:
        """Learning rates of some parameters, in units of the recipe's; those parameters have no weight decay."""

    def fingerprint(self) -> str:
        """Return a hash of all that the training depends on beside the recipe: initial weights, data, settings."""

    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """Yield the batches of an epoch, counted from 0, from the batch ``first`` on."""

    def loss(self, batch: Any, progress: float) -> Tensor | Iterable[Tensor]:
        """Return the loss of a batch, a scalar, after a share ``progress`` of all steps.

        Or yield its summands: each is differentiated, which frees what it computed, before the next one is computed.
        """

    def evaluate(self) -> EpochScore:
        """Return the score of the model, which is in evaluation mode, on data that are not trained on."""
