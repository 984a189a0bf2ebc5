"""Answers that hold a NaN or an infinity: a sign of overflow in FP16, of a broken engine, or of a strange input."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

log = logging.getLogger(__name__)


class NonfiniteWarnings:
    """Tells the log of such answers, but of each model only now and then: one bad engine spoils thousands.

    Args:
        seconds: between two warnings of one model.
    """

    def __init__(self, seconds: float = 60.0) -> None:
        self._seconds = seconds
        self._warned_at: dict[str, float] = {}
        self._untold: dict[str, int] = {}

    def found(self, model: str, tier: str, names: Sequence[str]) -> None:
        """Warn of one answer, or keep count of it until the next warning.

        Args:
            model: who gave it.
            tier: which of its tiers.
            names: of the outputs.
        """
        now = time.monotonic()
        if now < self._warned_at.get(model, now):
            self._untold[model] = self._untold.get(model, 0) + 1
            return
        self._warned_at[model] = now + self._seconds
        others = self._untold.pop(model, 0)
        also = f", and {others} answers before it" if others else ""
        log.warning("NaN or infinity in %s of model %r, tier %r%s", ", ".join(names), model, tier, also)
