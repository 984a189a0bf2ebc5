"""Random requests to a loop of :mod:`tests.support.loop_model`, and their right answers."""

from __future__ import annotations

import numpy as np

from edge.programs.loop import Loop
from edge.programs.program import Finished, Joining, LoopLimits, Options
from edge.protocol import BY_BUDGET, BY_TOLERANCE, STOPPED
from tests.support.loop_model import ENDLESS, MAX_BATCH_SIZE, TOKENS, prompt


def check_requests_that_join_and_leave(loop: Loop, seed: int) -> None:
    """Check the answers of requests that join a session, leave it, and are dropped, all at random."""
    random = np.random.default_rng(seed)
    session = loop.session(Options("full"))
    given: dict[int, tuple[np.ndarray, LoopLimits]] = {}
    ended: list[Finished] = []
    for _ in range(60):
        joining, room, tokens = [], MAX_BATCH_SIZE - session.rows, int(random.integers(1, TOKENS + 1))
        for _ in range(int(random.integers(1, 4))):
            rows = int(random.integers(1, 3))
            room -= rows
            if room >= 0:
                values = random.choice([1.0, 2.0, ENDLESS], rows).astype(np.float32)
                number = len(given)
                given[number] = values, LoopLimits(int(random.integers(1, 9)), float(random.choice([0.5, 0.1])))
                joining.append(
                    Joining(number, {"xs": prompt(*values, tokens=tokens)}, Options("full", given[number][1]))
                )
        if joining:
            session.add(joining)
        if random.random() < 0.2:
            session.drop(int(random.choice(list(given))))
        ended += session.step()
    assert len(ended) > 30
    for key, computed, _ in ended:
        values, limits = given[key]  # type: ignore[index]
        needed = np.where(values == ENDLESS, limits.max_loops, np.ceil(-np.log2(limits.tolerance)))
        loops = np.minimum(needed, limits.max_loops)
        left = np.float32(0.5) ** loops
        assert computed.outputs["loops"].ravel().tolist() == loops.tolist()
        np.testing.assert_allclose(computed.outputs["prediction"].ravel(), values * (1 - left), rtol=1e-6)
        np.testing.assert_allclose(computed.outputs["residual"].ravel(), left + (values == ENDLESS), rtol=1e-6)
        by_tolerance = (values != ENDLESS) & (needed <= limits.max_loops)
        assert computed.facts[STOPPED].tolist() == np.where(by_tolerance, BY_TOLERANCE, BY_BUDGET).tolist()
