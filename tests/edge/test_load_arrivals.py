"""Times at which requests are due: rate, distribution, seed, limits, and recorded traces."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from edge.errors import UsageError
from edge.load.arrivals import due_times, limited, read_trace
from edge.load.plan import PATTERNS

RATE = 250.0


def due(pattern: str, count: int = 20_000, **options: float) -> np.ndarray:
    return np.fromiter(itertools.islice(due_times(pattern, RATE, 7, **options), count), float)


def test_poisson_gaps_are_exponential_and_independent() -> None:
    gaps = np.diff(due("poisson"), prepend=0.0)
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / RATE, rel=0.02)
    assert gaps.std() == pytest.approx(1 / RATE, rel=0.03)  # of an exponential distribution the mean
    assert np.quantile(gaps, 0.5) == pytest.approx(np.log(2) / RATE, rel=0.03)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03
    counts = np.bincount((due("poisson") * 10).astype(int))[:-1]  # in tenths of a second
    assert counts.mean() == pytest.approx(RATE / 10, rel=0.03)
    assert counts.var() == pytest.approx(RATE / 10, rel=0.15)  # of a Poisson distribution the mean


def test_constant_gaps_are_equal() -> None:
    assert np.diff(due("constant", 1000)) == pytest.approx(1 / RATE)
    assert due("constant", 1)[0] == 0


def test_bursts_keep_the_mean_rate_and_pause_in_between() -> None:
    times = due("burst", burst_period_seconds=2.0, burst_share=0.25)
    assert (np.diff(times) > 0).all()
    assert (times % 2.0).max() < 0.5
    assert len(times) / (times[-1] // 2 * 2) == pytest.approx(RATE, rel=0.03)
    within = np.diff(times)
    within = within[within < 1.0]
    assert within.mean() == pytest.approx(1 / (4 * RATE), rel=0.03)
    assert within.std() == pytest.approx(1 / (4 * RATE), rel=0.05)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_seed_determines_the_times(pattern: str) -> None:
    def first(seed: int) -> list[float]:
        return list(itertools.islice(due_times(pattern, RATE, seed), 5000))

    assert first(1) == first(1)
    assert (first(1) == first(2)) == (pattern == "constant")


def test_times_are_limited_by_time_and_number() -> None:
    assert list(limited(due_times("constant", 10.0), 0.35)) == [0.0, 0.1, 0.2, 0.3]
    assert list(limited(due_times("constant", 10.0), 0.35, 2)) == [0.0, 0.1]
    assert len(list(limited(due_times("constant", 10.0), float("inf"), 12))) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "sine"}, "one of poisson, constant, burst"),
        ({"rate": 0.0}, "--rate: got 0.0"),
        ({"rate": float("nan")}, "--rate: got nan"),
        ({"burst_period_seconds": -1.0}, "--burst-period: got -1.0"),
        ({"burst_share": 1.5}, "above 0, at most 1"),
    ],
)
def test_invalid_arrivals_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        due_times(**{"pattern": "poisson", "rate": 1.0, **options})  # type: ignore[arg-type]


def test_trace_starts_at_zero(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('100.5\n{"at": 101, "who": "someone"}\n\n101\n103.25\n')
    assert list(read_trace(tmp_path / "trace")) == [0.0, 0.5, 0.5, 2.75]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no times"),
        ("1\n0.5\n", "line 2: got 0.5, expected 1 or later"),
        ("soon\n", "line 1: got soon, expected seconds"),
        ("true\n", "expected seconds"),
        ('{"when": 1}\n', "expected seconds"),
        ("1e999\n", "expected seconds"),
    ],
)
def test_invalid_traces_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_trace(tmp_path / "trace")
    with pytest.raises(UsageError, match="expected a file to read"):
        read_trace(tmp_path / "absent")
