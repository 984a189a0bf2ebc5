"""Settings and parts of a comparison, as its directory has them."""

from __future__ import annotations

import msgspec

from edge.bundles.manifest import Measure

#: Peak learning rates, the same for every method.
RATES = (2e-4, 1e-3, 5e-3, 2.5e-2, 1e-1)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of all parts.

    Attributes:
        backbone: SHA-256 of its identity.
        data: SHA-256 of the files of each task.
        limit: examples to train on.
        epochs: passes over them.
        items: test examples that are answered; the cross-entropy is over all.
    """

    backbone: str
    data: dict[str, str]
    limit: int
    epochs: int
    items: int
    rates: tuple[float, ...] = RATES


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A method on a task with a seed.

    Attributes:
        parameters: that were trained.
        rate: the learning rate that was used; None without training.
        holdout: cross-entropy by learning rate, of those that were tried; None where the training diverged.
        losses: sum of the cross-entropies of each test example's tokens, and ``tokens`` their number. Empty for other
            ways to write texts of the frozen model.
        answers: to the first test examples; None where a text has none.
        measures: all metrics on the test split.
    """

    task: str
    method: str
    seed: int
    parameters: int = 0
    seconds: float = 0.0
    rate: float | None = None
    holdout: dict[str, float | None] = {}
    losses: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    answers: tuple[str | None, ...]
    measures: tuple[Measure, ...]
