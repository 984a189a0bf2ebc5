"""Loops: sessions of rows that end independently, continuous batching in the scheduler, limits and golden checks."""

import asyncio
import gc
import re
import time
import weakref

import msgspec
import numpy as np
import pytest

from edge.bundles import rules
from edge.bundles.manifest import TensorSpec
from edge.errors import BundleError, DeadlineExceeded, InvalidRequest, Overloaded, RunnerError
from edge.instruments.metrics import ModelNow
from edge.instruments.snapshot import LoopEnd
from edge.instruments.statistics import ModelStatistics
from edge.programs.program import Joining, LoopLimits, Options
from edge.protocol import LOOPS, STOPPED
from edge.scheduling.tier_executor import ServingOptions
from edge.telemetry.metrics import families
from edge.telemetry.telemetry import request_metrics
from tests.support.in_process import running_service
from tests.support.loop_model import (
    ENDLESS,
    FAILING,
    MOST_LOOPS,
    NAME,
    array_of,
    loop_request,
    prompt,
    write_halving_bundle,
)
from tests.support.metrics import CountedRequest, rendered, wait_until
from tests.support.models import ORACLE, write_oracle_bundle
from tests.support.sample_requests import expression

FULL = Options("full")


def limited(max_loops, tolerance=0.1):
    return Options("full", LoopLimits(max_loops, tolerance))


def test_rows_stop_at_their_tolerance_or_budget(loop):
    computed = loop.compute({"xs": prompt(1, 2, ENDLESS)}, FULL)
    assert computed.outputs["loops"].ravel().tolist() == computed.facts[LOOPS].tolist() == [4, 4, 20]  # 2 ** -4 < 0.1
    np.testing.assert_allclose(computed.outputs["prediction"].ravel(), [15 / 16, 15 / 8, 3], rtol=1e-5)
    np.testing.assert_allclose(computed.outputs["residual"].ravel(), [1 / 16, 1 / 16, 1 + 2**-20], rtol=1e-5)
    assert computed.facts[STOPPED].tolist() == ["tolerance", "tolerance", "budget"]
    assert computed.repeats == 20
    for most, tolerance, loops in ((3, 0.1, 3), (99, 0.25, 2), (99, 0.2499, 3), (1, 0.1, 1), (99, 1e300, 1)):
        computed = loop.compute({"xs": prompt(1)}, limited(most, tolerance))
        assert computed.outputs["loops"].tolist() == [[loops]]


def test_requests_of_different_lengths_join_and_leave_between_steps(loop):
    session = loop.session(FULL)
    session.add([Joining("short", {"xs": prompt(1, 2, tokens=2)}, limited(99, 0.5))])
    session.add([Joining("long", {"xs": prompt(2, tokens=5)}, FULL)])
    (first,) = session.step()
    assert (first.key, first.computed.outputs["loops"].tolist(), session.rows) == ("short", [[1], [1]], 1)
    np.testing.assert_array_equal(first.computed.outputs["prediction"], [[0.5], [1]])
    session.add([Joining("late", {"xs": prompt(2, tokens=1)}, limited(99, 0.25))])
    session.add([Joining("dropped", {"xs": prompt(ENDLESS)}, FULL)])
    assert (session.step(), session.rows) == ([], 3)
    session.drop("dropped")
    session.drop("unknown")
    assert session.rows == 2
    ended = {one.key: one.computed.outputs for _ in range(2) for one in session.step()}
    assert {key: outputs["loops"].tolist() for key, outputs in ended.items()} == {"late": [[2]], "long": [[4]]}
    assert [ended[key]["prediction"].item() for key in ("late", "long")] == [1.5, 1.875]
    assert session.rows == 0


def test_an_embedding_of_other_rows_is_refused(loop, monkeypatch):
    session, embed = loop.session(FULL), loop._runners["full"].embed
    session.add([Joining("good", {"xs": prompt(1)}, FULL)])
    infer = embed.infer
    monkeypatch.setattr(embed, "infer", lambda feeds: infer({"xs": feeds["xs"][:1]}))
    with pytest.raises(
        RunnerError, match="output 'state': got 1 rows for 2, expected a row for each row of the inputs"
    ):
        session.add([Joining("bad", {"xs": prompt(1, 2)}, FULL)])
    assert session.rows == 1
    assert [one.key for _ in range(4) for one in session.step()] == ["good"]


# In the scheduler.


@pytest.fixture
async def running(tmp_path):
    def write(repository):
        write_halving_bundle(repository / NAME)
        write_oracle_bundle(repository / "oracle")

    async with running_service(tmp_path, write) as running:
        yield running


ENDLESS_REQUEST = {"max_loops": MOST_LOOPS}


async def test_a_short_request_overtakes_a_long_one(running):
    long = asyncio.create_task(running.infer(loop_request(ENDLESS, **ENDLESS_REQUEST)))
    await asyncio.sleep(0.05)
    begun = running.counted(NAME).batches
    for _ in range(5):
        response = await running.infer(loop_request(1, tokens=2))
        assert array_of(response, "loops").tolist() == [4]
        assert response.parameters["stopped"].string_param == "tolerance"
    assert not long.done()
    assert running.counted(NAME).batches != begun  # they ran beside it
    calculated = await running.infer(expression(b"1 + 2"))  # another model has its turn, too
    assert np.frombuffer(calculated.raw_output_contents[0], np.float32).tolist() == [3]
    assert not long.done()
    long.cancel()
    assert await running.at_rest(NAME)


async def test_steps_are_seen_while_they_run_and_a_request_counts_once(running):
    long = asyncio.create_task(running.infer(loop_request(ENDLESS, max_loops=2_000)))
    seen = None
    while not long.done() and not seen:
        await asyncio.sleep(0)
        seen = running.scheduler.runs.now[0]  # what the watchdog and the energy meter read
    assert (seen.executor.tier, seen.size) == ("full", 3)
    await asyncio.gather(long, running.infer(loop_request(1)))
    assert running.repository.find(NAME, "").statistics.runs()["full"].requests == 2
    assert running.scheduler.runs.now == [None]


async def test_the_error_of_a_request_whose_client_has_gone_is_dropped(running, caplog):
    gc.disable()  # it would find the cycle of the error and its request, too late
    try:
        call = running.service.start(loop_request(FAILING), None, lambda end: None)
        assert wait_until(lambda: call.error is not None)
        error = weakref.ref(call.error)
        running.service.cancel(call)
        assert await running.at_rest(NAME)
        caplog.clear()
        assert error() is None
    finally:
        gc.enable()


async def test_limits_of_a_request_are_checked(running):
    xs = "input 'xs' of 'halving': got NaN or Inf, expected finite numbers"
    for message, expected in (
        (loop_request(1, max_loops=MOST_LOOPS + 1), f"got {MOST_LOOPS + 1}, expected 1 to {MOST_LOOPS}. Ask for fewer"),
        (loop_request(1, max_loops=0), "parameter 'max_loops' of 'halving': got 0, expected 1 to"),
        (
            loop_request(1, tolerance=0.0),
            "'tolerance' of 'halving': got 0.0, expected a finite number above 0. 0.1 is the",
        ),
        (loop_request(1, tolerance=0), "'tolerance' of 'halving': got 0.0, expected a finite number above 0"),
        (
            loop_request(1, tolerance=float("nan")),
            "'tolerance' of 'halving': got nan, expected a finite number above 0",
        ),
        (loop_request(1, tolerance="1"), "parameter 'tolerance': got 'string_param', expected double_param or int64"),
        (loop_request(float("nan")), xs),
        (loop_request(float("inf")), xs),
        (loop_request(1, tokens=6), "input 'xs' shape of 'halving': got [1, 6, 1], expected between [1, 1, 1] and"),
    ):
        with pytest.raises(InvalidRequest, match=re.escape(expected)):
            await running.infer(message)
    assert array_of(await running.infer(loop_request(1, tolerance=1)), "loops").tolist() == [1]
    await running.infer(loop_request(1))
    with pytest.raises(InvalidRequest, match=re.escape(xs)):  # also in a form that is known
        await running.infer(loop_request(float("nan")))
    assert await running.at_rest(NAME)
    other = expression(b"1 + 2")
    other.parameters["max_loops"].int64_param = 3
    with pytest.raises(InvalidRequest, match=f"'max_loops' of '{ORACLE}': got 3, expected none: the model is not"):
        await running.infer(other)
    response = await running.infer(loop_request(1, max_loops=3))
    assert (array_of(response, "loops").tolist(), response.parameters["stopped"].string_param) == ([3], "budget")


# The bundle.


async def test_a_loop_that_does_not_reproduce_its_golden_set_is_not_served(tmp_path):
    async with running_service(tmp_path, lambda place: write_halving_bundle(place / NAME, golden_loops=3)) as running:
        entry = running.repository.find(NAME, "")
        assert "halving tier full output 'prediction'" in str(entry.reason)


def test_broken_programs_name_the_field(loop_bundle):
    manifest = loop_bundle.manifest
    tier = manifest.tiers[0]
    embed, step = tier.artifacts

    def changed(**fields):
        return msgspec.structs.replace(manifest, **fields)

    def program(**fields):
        return changed(program=msgspec.structs.replace(manifest.program, **fields))

    def files(*artifacts):
        return changed(tiers=(msgspec.structs.replace(tier, artifacts=artifacts),))

    other = (TensorSpec("other", "FP32", (-1, -1, 1)), embed.outputs[1])
    for broken, message in (
        (program(max_loops=MOST_LOOPS + 1), f"loop max_loops: got {MOST_LOOPS + 1}, expected at most most_loops"),
        (program(residual="zz"), "m loop outputs: got ['loops', 'prediction', 'residual'], expected"),
        (program(last="zz"), "files of tier 'full': got ['last', 'prompt', 'state'], expected the inputs ['prompt', "),
        (program(next_state="zz"), "got ['next_state', 'prediction', 'residual'], expected the outputs ['prediction'"),
        (files(embed), "roles of the artifacts: got ['embed'], expected 'step' among them"),
        (files(msgspec.structs.replace(embed, outputs=other), step), "expected 'state' and 'prompt', as the step"),
        (files(msgspec.structs.replace(embed, golden=None), step), "golden of artifact 'embed.onnx': got none, expect"),
    ):
        with pytest.raises(BundleError, match=re.escape(message)):
            rules.check(broken, "m")


def end_of(response):
    return array_of(response, "loops").tolist(), response.parameters["stopped"].string_param


async def test_a_request_gets_as_many_loops_as_fit_and_says_so(running):
    begun = time.monotonic()
    request = loop_request(1, ENDLESS, policy="deadline", **ENDLESS_REQUEST)
    response = await running.infer(request, begun + 1)
    (settled, cut), stopped = end_of(response)
    assert (settled, stopped) == (4, "deadline")
    assert 4 < cut < MOST_LOOPS
    assert array_of(response, "prediction").tolist() == [15 / 16, 3]
    assert await running.at_rest(NAME)
    assert running.repository.find(NAME, "").statistics.runs()["full"].requests == 1
    # With enough time it stops for the usual reasons.
    request = loop_request(1, policy="deadline", max_loops=3)
    assert end_of(await running.infer(request, time.monotonic() + 60)) == ([3], "budget")
    assert end_of(await running.infer(request)) == ([3], "budget")
    # Without the policy, it is too late.
    with pytest.raises(DeadlineExceeded):
        await running.infer(loop_request(ENDLESS, **ENDLESS_REQUEST), time.monotonic() + 0.2)
    assert running.counted(NAME).failures == {"DeadlineExceeded": 1}


async def test_requests_beside_it_go_on(running):
    long = asyncio.create_task(running.infer(loop_request(ENDLESS, max_loops=20_000)))
    await asyncio.sleep(0.01)
    cut = await running.infer(loop_request(ENDLESS, policy="deadline", **ENDLESS_REQUEST), time.monotonic() + 0.3)
    assert end_of(cut)[1] == "deadline"
    assert end_of(await long) == ([20_000], "budget")


async def test_the_policy_of_the_server_counts(tmp_path):
    options = ServingOptions(policy="deadline")
    async with running_service(tmp_path, lambda place: write_halving_bundle(place / NAME), serving=options) as running:
        response = await running.infer(loop_request(ENDLESS, **ENDLESS_REQUEST), time.monotonic() + 0.3)
        assert end_of(response)[1] == "deadline"
        request = loop_request(ENDLESS, policy="pinned", **ENDLESS_REQUEST)
        with pytest.raises(DeadlineExceeded):
            await running.infer(request, time.monotonic() + 0.1)


async def test_admission_counts_the_loops_of_each_request(running):
    executor = running.model(NAME).executors["full"]
    finest = {"tolerance": 1e-9}
    executor.loops.observe(LoopLimits(MOST_LOOPS, 1e-9), MOST_LOOPS)  # ten seconds and more
    beside = asyncio.create_task(running.infer(loop_request(ENDLESS, **ENDLESS_REQUEST)))  # the next ones are queued
    await asyncio.sleep(0.05)
    endless = loop_request(ENDLESS, **finest, **ENDLESS_REQUEST)
    with pytest.raises(Overloaded) as caught:
        await running.infer(endless, time.monotonic() + 0.5)
    assert caught.value.cause == "deadline"
    few = loop_request(ENDLESS, max_loops=2, **finest)
    assert end_of(await running.infer(few, time.monotonic() + 5)) == ([2], "budget")
    endless.parameters["policy"].string_param = "deadline"
    assert end_of(await running.infer(endless, time.monotonic() + 0.5))[1] == "deadline"
    for _ in range(20):  # on a busy machine, the deadline may pass before the admission
        with pytest.raises((Overloaded, DeadlineExceeded)) as caught:  # not even a step fits
            await running.infer(endless, time.monotonic() + 0.0009)
        if caught.type is Overloaded:
            break
    assert caught.type is Overloaded
    beside.cancel()
    assert await running.at_rest(NAME)


def page_of(statistics):
    page = rendered(families([ModelNow("m", "1", statistics.snapshot())]))
    lines = [line.replace('model="m",', "").replace(',version="1"', "") for line in page.splitlines()]
    return [line for line in lines if "loop" in line or "residual" in line if not line.startswith("#")]


async def test_requests_are_counted_by_loops_residual_and_end(tmp_path):
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


def test_diverged_loop_does_not_spoil_the_sum_and_others_have_no_such_metrics():
    statistics = ModelStatistics()
    statistics.succeeded(CountedRequest())
    assert page_of(statistics) == []
    for residual in (float("nan"), float("inf"), 5e8):
        statistics.succeeded(CountedRequest(end=LoopEnd("full", 7, residual, "budget")))
    assert 'fewheads_residual_ratio_sum{tier="full"} 3000.0' in page_of(statistics)
    assert 'fewheads_residual_ratio_bucket{le="1",tier="full"} 0.0' in page_of(statistics)
