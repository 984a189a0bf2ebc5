"""Metrics of loops: what they took, what was left, and why they stopped."""

from __future__ import annotations

import time
from pathlib import Path

from edge.instruments.metrics import ModelNow
from edge.instruments.snapshot import LoopEnd
from edge.instruments.statistics import ModelStatistics
from edge.telemetry.metrics import families
from edge.telemetry.telemetry import request_metrics
from tests.support.inference_service import running_service
from tests.support.loop_model import ENDLESS, MOST_LOOPS, NAME, loop_request, write_halving_bundle
from tests.support.metrics import CountedRequest, rendered


def page_of(statistics: ModelStatistics) -> list[str]:
    page = rendered(families([ModelNow("m", "1", statistics.snapshot())]))
    lines = [line.replace('model="m",', "").replace(',version="1"', "") for line in page.splitlines()]
    return [line for line in lines if "loop" in line or "residual" in line if not line.startswith("#")]


async def test_requests_are_counted_by_loops_residual_and_end(tmp_path: Path) -> None:
    async with running_service(tmp_path, lambda place: write_halving_bundle(place / NAME)) as running:
        for message in (
            loop_request(1, 2, tolerance=0.5),  # 1 loop, 0.5
            loop_request(1, tolerance=0.06, max_loops=3),  # 3 loops, 0.125
            loop_request(1, tolerance=0.3),  # 2 loops, 0.25
        ):
            await running.infer(message)
        cut = loop_request(ENDLESS, policy="deadline", max_loops=MOST_LOOPS)
        await running.infer(cut, time.monotonic() + 0.3)
        lines = page_of(running.repository.find(NAME, "").statistics)
        assert 'fewheads_request_loops_bucket{le="1",tier="full"} 1.0' in lines
        assert 'fewheads_request_loops_bucket{le="2",tier="full"} 2.0' in lines
        assert 'fewheads_request_loops_bucket{le="3",tier="full"} 3.0' in lines
        assert 'fewheads_residual_ratio_bucket{le="0.1",tier="full"} 0.0' in lines
        assert 'fewheads_residual_ratio_bucket{le="0.2",tier="full"} 1.0' in lines
        assert 'fewheads_residual_ratio_bucket{le="0.5",tier="full"} 3.0' in lines
        ends = [line for line in lines if line.startswith("fewheads_loop_ends_total")]
        counts = {'"tolerance"': 2, '"budget"': 1, '"deadline"': 1}
        expected = [f'fewheads_loop_ends_total{{stopped={end},tier="full"}} {count}.0' for end, count in counts.items()]
        assert ends == expected
        telemetry = {metric.name for metric in request_metrics(running.counted(NAME))}
        assert {"fewheads_request_loops_sum", "fewheads_residual_ratio_count", "fewheads_loop_ends_total"} <= telemetry


def test_diverged_loop_does_not_spoil_the_sum_and_others_have_no_such_metrics() -> None:
    statistics = ModelStatistics()
    statistics.succeeded(CountedRequest())
    assert page_of(statistics) == []
    for residual in (float("nan"), float("inf"), 5e8):
        statistics.succeeded(CountedRequest(end=LoopEnd("full", 7, residual, "budget")))
    assert 'fewheads_residual_ratio_sum{tier="full"} 3000.0' in page_of(statistics)
    assert 'fewheads_residual_ratio_bucket{le="1",tier="full"} 0.0' in page_of(statistics)
