"""Under overload, policies with leaner tiers have a higher goodput than the full tier alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from edge.errors import UsageError
from edge.load.goodput import goodput
from tests.support.models import ORACLE_BUNDLE
from tests.support.tiered_model import write_tiered_bundle

POLICIES = ("pinned", "load", "deadline")


@pytest.mark.slow
def test_leaner_tiers_raise_the_goodput(tmp_path: Path) -> None:
    write_tiered_bundle(tmp_path / "tiered")
    report = goodput(
        tmp_path / "tiered",
        policies=POLICIES,
        factor=2.0,
        seconds=4.0,
        rounds=3,
        deadline_ms=None,
        target="onnxruntime",
        cache=tmp_path / "cache",
    )
    by_policy = {burst.policy: burst for burst in report.bursts}
    assert list(by_policy) == list(POLICIES)
    pinned = by_policy["pinned"]
    assert set(pinned.tiers) == {"full"}
    assert pinned.refused > 0.2 * pinned.sent  # at once, beyond its capacity
    for burst in report.bursts:
        assert burst.sent == math.ceil(report.offered_per_second * 4.0) * 3
        assert burst.sent == burst.in_time + burst.refused + burst.late
        assert burst.p99_ms <= report.deadline_ms
    assert by_policy["load"].per_second > 1.2 * pinned.per_second
    # It uses all of the time until the deadline, so any disturbance makes some responses late.
    assert by_policy["deadline"].per_second > pinned.per_second
    for policy in ("load", "deadline"):
        assert set(by_policy[policy].tiers) - {"full"}


def test_model_with_one_tier_is_rejected() -> None:
    with pytest.raises(
        UsageError, match="BUNDLE: got calculator-oracle with one tier, expected one with several tiers"
    ):
        goodput(ORACLE_BUNDLE, policies=POLICIES, factor=2, seconds=1, rounds=1, deadline_ms=None)
