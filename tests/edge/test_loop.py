"""Loops: sessions of rows that end independently, continuous batching in the scheduler, limits and golden checks."""

from __future__ import annotations

import asyncio
import gc
import re
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from edge.bundles import rules
from edge.bundles.bundle import Bundle
from edge.bundles.manifest import TensorSpec
from edge.errors import BundleError, InvalidRequest, RunnerError
from edge.programs.loop import Loop
from edge.programs.program import Joining, LoopLimits, Options
from edge.protocol import LOOPS, STOPPED
from tests.support.in_process import Running, running_service
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
from tests.support.metrics import wait_until
from tests.support.models import ORACLE, write_oracle_bundle
from tests.support.sample_requests import expression

FULL = Options("full")


def limited(max_loops: int, tolerance: float = 0.1) -> Options:
    return Options("full", LoopLimits(max_loops, tolerance))


def test_rows_stop_at_their_tolerance_or_budget(loop: Loop) -> None:
    computed = loop.compute({"xs": prompt(1, 2, ENDLESS)}, FULL)
    assert computed.outputs["loops"].ravel().tolist() == computed.facts[LOOPS].tolist() == [4, 4, 20]  # 2 ** -4 < 0.1
    np.testing.assert_allclose(computed.outputs["prediction"].ravel(), [15 / 16, 15 / 8, 3], rtol=1e-5)
    np.testing.assert_allclose(computed.outputs["residual"].ravel(), [1 / 16, 1 / 16, 1 + 2**-20], rtol=1e-5)
    assert computed.facts[STOPPED].tolist() == ["tolerance", "tolerance", "budget"]
    assert computed.repeats == 20
    for most, tolerance, loops in ((3, 0.1, 3), (99, 0.25, 2), (99, 0.2499, 3), (1, 0.1, 1), (99, 1e300, 1)):
        computed = loop.compute({"xs": prompt(1)}, limited(most, tolerance))
        assert computed.outputs["loops"].tolist() == [[loops]]


def test_requests_of_different_lengths_join_and_leave_between_steps(loop: Loop) -> None:
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


def test_a_request_that_cannot_be_embedded_leaves_the_session_as_it_is(loop: Loop) -> None:
    session = loop.session(FULL)
    session.add([Joining("good", {"xs": prompt(1)}, FULL)])
    with pytest.raises(RunnerError):
        session.add([Joining("bad", {"xs": np.zeros((1, 3, 2), np.float32)}, FULL)])
    assert session.rows == 1
    assert [one.key for _ in range(4) for one in session.step()] == ["good"]


def test_an_embedding_of_other_rows_is_refused(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest_asyncio.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    def write(repository: Path) -> None:
        write_halving_bundle(repository / NAME)
        write_oracle_bundle(repository / "oracle")

    async with running_service(tmp_path, write) as running:
        yield running


ENDLESS_REQUEST = {"max_loops": MOST_LOOPS}


async def test_a_short_request_overtakes_a_long_one(running: Running) -> None:
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


async def test_steps_are_seen_while_they_run_and_a_request_counts_once(running: Running) -> None:
    long = asyncio.create_task(running.infer(loop_request(ENDLESS, max_loops=2_000)))
    seen = None
    while not long.done() and not seen:
        await asyncio.sleep(0)
        seen = running.scheduler.runs.now[0]  # what the watchdog and the energy meter read
    assert seen
    assert (seen.executor.tier, seen.size) == ("full", 3)
    await asyncio.gather(long, running.infer(loop_request(1)))
    assert running.repository.find(NAME, "").statistics.runs()["full"].requests == 2
    assert running.scheduler.runs.now == [None]


async def test_the_error_of_a_request_whose_client_has_gone_is_dropped(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    gc.disable()  # it would find the cycle of the error and its request, too late
    try:
        call = running.service.start(loop_request(FAILING), None, lambda end: None)
        assert call
        assert wait_until(lambda: call.error is not None)
        error = weakref.ref(call.error)  # type: ignore[arg-type]
        running.service.cancel(call)
        assert await running.at_rest(NAME)
        caplog.clear()
        assert error() is None
    finally:
        gc.enable()


async def test_limits_of_a_request_are_checked(running: Running) -> None:
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
        (
            loop_request(1, tokens=6),
            "input 'xs' shape of 'halving': got [1, 6, 1], expected between [1, 1, 1] and",
        ),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await running.infer(message)
        assert expected in str(caught.value)
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


async def test_a_loop_that_does_not_reproduce_its_golden_set_is_not_served(tmp_path: Path) -> None:
    async with running_service(tmp_path, lambda place: write_halving_bundle(place / NAME, golden_loops=3)) as running:
        entry = running.repository.find(NAME, "")
        assert "halving tier full output 'prediction'" in str(entry.reason)


def test_broken_programs_name_the_field(loop_bundle: Bundle) -> None:
    manifest = loop_bundle.manifest
    tier = manifest.tiers[0]
    embed, step = tier.artifacts

    def changed(**fields: Any) -> Any:
        return msgspec.structs.replace(manifest, **fields)

    def program(**fields: Any) -> Any:
        return changed(program=msgspec.structs.replace(manifest.program, **fields))

    def files(*artifacts: Any) -> Any:
        return changed(tiers=(msgspec.structs.replace(tier, artifacts=artifacts),))

    other = (TensorSpec("other", "FP32", (-1, -1, 1)), embed.outputs[1])  # type: ignore[index]
    for broken, message in (
        (program(max_loops=MOST_LOOPS + 1), f"loop max_loops: got {MOST_LOOPS + 1}, expected at most most_loops"),
        (program(residual="zz"), "m loop outputs: got ['loops', 'prediction', 'residual'], expected"),
        (program(last="zz"), "files of tier 'full': got ['last', 'prompt', 'state'], expected the inputs ['prompt', "),
        (program(next_state="zz"), "got ['next_state', 'prediction', 'residual'], expected the outputs ['prediction'"),
        (files(embed), "roles of the artifacts: got ['embed'], expected 'step' among them"),
        (
            files(msgspec.structs.replace(embed, outputs=other), step),
            "expected 'state' and 'prompt', as the step",
        ),
        (files(msgspec.structs.replace(embed, golden=None), step), "golden of artifact 'embed.onnx': got none, expect"),
    ):
        with pytest.raises(BundleError) as caught:
            rules.check(broken, "m")
        assert message in str(caught.value)
