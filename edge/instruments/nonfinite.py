"""Warnings of responses with a NaN or an infinity: FP16 overflowed, an engine is broken, or the input is odd."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

log = logging.getLogger(__name__)


class NonfiniteWarnings:
    """Logs one warning in ``seconds`` for each model, because one bad engine can spoil thousands of responses."""

    def __init__(self, seconds: float = 60.0) -> None:
        self._seconds = seconds
        self._warned_at: dict[str, float] = {}
        self._unreported: dict[str, int] = {}

    def found(self, model: str, tier: str, names: Sequence[str]) -> None:
        """Warn of one response whose outputs ``names`` have such a value, or count it for the next warning."""
        now = time.monotonic()
        if now < self._warned_at.get(model, now):
            self._unreported[model] = self._unreported.get(model, 0) + 1
            return
        self._warned_at[model] = now + self._seconds
        others = self._unreported.pop(model, 0)
        also = f", and in {others} responses before" if others else ""
        log.warning("NaN or infinity in %s of model %r, tier %r%s", ", ".join(names), model, tier, also)
