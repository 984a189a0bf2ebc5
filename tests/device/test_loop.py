"""Loops on TensorRT: answers of ONNX Runtime, a state that never leaves the device, graphs of steps, and failures."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import msgspec
import numpy as np
import pytest
from tritonclient.grpc.aio import InferenceServerClient

pytest.importorskip("tensorrt")

from edge.errors import InvalidRequest, RunnerError
from edge.programs.loop import Loop, LoopRunners
from edge.programs.program import Joining, LoopLimits, Options
from edge.runner import LoopTensors
from edge.runtimes.build import load_runner
from edge.runtimes.tensorrt.device import shared_device
from edge.scheduling.batching import BatchAssembler
from edge.scheduling.continuous import ContinuousRun
from edge.scheduling.job import Job
from edge.scheduling.runs import Runs
from edge.scheduling.tier_executor import LoopExecutor
from tests.device.software import LAUNCH
from tests.support.commands import shown
from tests.support.in_process import running_here
from tests.support.loop_model import ENDLESS, NAME, check_requests_that_join_and_leave, prompt, write_halving_bundle
from tests.support.sample_requests import triton_input

FULL = Options("full")
TENSORS = LoopTensors("state", "prompt", "last", "next_state", "prediction", "residual")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_halving_bundle(tmp_path_factory.mktemp("loop") / NAME)


@pytest.fixture(scope="module")
def cache(bundle, tmp_path_factory):
    """A cache with the engines of both roles, each built in a child process."""
    directory = tmp_path_factory.mktemp("cache")
    built = json.loads(shown("build", bundle.path, "--target", "tensorrt", "--cache", directory, "--json"))
    assert [one["build"]["golden"]["rows"] for one in built] == [2, 2]
    return directory


@contextmanager
def runners(bundle, cache):
    both = LoopRunners(*(load_runner(bundle, "tensorrt", cache, role=role).runner for role in ("embed", "step")))
    with closing(both.embed), closing(both.step):
        yield both


@pytest.fixture
def device_runners(bundle, cache):
    with runners(bundle, cache) as both:
        yield both


def loop_of(bundle, both, check_every=1):
    return Loop(msgspec.structs.replace(bundle.manifest.program, check_every=check_every), {"full": both})


def limited(max_loops, tolerance=1e-9):
    return Options("full", LoopLimits(max_loops, tolerance))


@pytest.mark.parametrize("check_every", [1, 2, 3])
def test_rows_that_join_and_leave_get_the_right_answers(bundle, device_runners, check_every):
    check_requests_that_join_and_leave(loop_of(bundle, device_runners, check_every), seed=check_every)


def test_a_state_never_leaves_the_device(bundle, device_runners, software):
    session = loop_of(bundle, device_runners).session(FULL)

    def copies(work):
        counts = software.copies(work)
        return counts["to"], counts["back"], counts["within"]

    def join(name, inputs, max_loops):
        session.add([Joining(name, {"xs": inputs}, limited(max_loops))])

    # The prompts are mapped memory. The embedding stays on the device: three tokens of each row, in rows of five.
    assert copies(lambda: join("long", prompt(ENDLESS, ENDLESS, ENDLESS), 50)) == (0, 0, 6)
    # In: where the prompts end. Back: one copy for the results of each step without a graph, and two in captures.
    assert copies(lambda: [session.step() for _ in range(12)]) == (1, 6, 0)
    join("short", prompt(1, tokens=5), 1)
    ended = []
    # The same graph, with a surplus row less; its own copies are no calls. The last row leaves nothing to move.
    assert copies(lambda: ended.extend(one.key for _ in range(2) for one in session.step())) == (1, 0, 0)
    assert ended == ["short"]
    join("second", prompt(1, tokens=5), 99)
    # Three of four rows, so the fourth moves to the front: its state and its prompt.
    assert copies(lambda: session.drop("long")) == (0, 0, 2)
    assert session.rows == 1


def test_a_step_with_a_graph_takes_five_calls_of_the_driver(device_runners, software):
    loop = device_runners.step.loop(TENSORS, steps=4)
    loop.add(np.ones((3, 2, 1), np.float32), np.ones((3, 2, 1), np.float32))
    for _ in range(2):
        loop.step()
    assert software.counted_with_tensorrt(loop.step) == LAUNCH


@pytest.mark.parametrize(
    ("check_every", "counts"),
    [
        (1, {"enqueues": 4, "captures": 2, "launches": 6}),  # one graph reads the first buffer, one the second
        (3, {"enqueues": 12, "captures": 2, "launches": 6}),
        (4, {"enqueues": 8, "captures": 1, "launches": 8}),  # an even number of steps ends where it began
    ],
)
def test_two_buffers_alternate_in_few_graphs(bundle, device_runners, check_every, counts):
    session = loop_of(bundle, device_runners, check_every).session(FULL)
    shared = shared_device()
    session.add([Joining("endless", {"xs": prompt(ENDLESS, ENDLESS, ENDLESS)}, limited(10 * check_every))])
    shared.counts.clear()
    (ended,) = [one for _ in range(10) for one in session.step()]
    assert shared.counts == counts
    outputs = ended.computed.outputs
    assert outputs["loops"].ravel().tolist() == [10 * check_every] * 3
    np.testing.assert_allclose(outputs["prediction"], 3 * (1 - 0.5 ** (10 * check_every)) * np.ones((3, 1)), rtol=1e-6)
    # Four rows, and other rows of another session, use the same graphs.
    other = loop_of(bundle, device_runners, check_every).session(FULL)
    del session
    again = loop_of(bundle, device_runners, check_every).session(FULL)
    again.add([Joining("four", {"xs": prompt(1, 1, 1, 1)}, limited(2 * check_every))])
    shared.counts.clear()
    assert [one.key for _ in range(2) for one in again.step()] == ["four"]
    assert shared.counts == {"launches": 2}
    assert other.rows == 0


def test_memory_of_a_dropped_session_is_reused(bundle, device_runners, software):
    loop = loop_of(bundle, device_runners)

    def abandoned():
        session = loop.session(FULL)
        session.add([Joining("left", {"xs": np.full((4, 5, 1), np.nan, np.float32)}, FULL)])
        return session

    sessions, lives = [abandoned() for _ in range(2)], []
    for _ in range(6):
        with ThreadPoolExecutor(1) as dropping:  # whichever thread drops the last reference
            dropping.submit(sessions.clear).result()
        assert loop.compute({"xs": prompt(2, 1)}, FULL).outputs["prediction"].tolist() == [[15 / 8], [15 / 16]]
        sessions += [abandoned() for _ in range(2)]
        lives.append(software.live())
    assert lives[-1] == lives[2]  # when all graphs had been captured


def test_rows_that_do_not_fit_are_rejected(device_runners):
    loop = device_runners.step.loop(TENSORS)
    for shape in ((5, 3, 1), (1, 6, 1), (1, 3, 2)):
        array = np.zeros(shape, np.float32)
        with pytest.raises(InvalidRequest, match=r"states and prompts of model .* two equal shapes up to \[4, 5, 1\]"):
            loop.add(array, array)
    loop.add(np.ones((1, 2, 1), np.float32), np.ones((1, 2, 1), np.float32))
    np.testing.assert_array_equal(np.ravel(loop.step()), [1, 0])


@pytest.mark.parametrize("check_every", [1, 4])
def test_a_failure_in_any_call_ends_the_loop_or_costs_its_graphs(bundle, cache, software, check_every):
    def play(both):
        """Return whether a loop that replays a graph came through, with the right answers."""
        session = loop_of(bundle, both, check_every).session(FULL)
        try:
            session.add([Joining("two", {"xs": prompt(2, ENDLESS, tokens=2)}, limited(6 * check_every))])
            (ended,) = [one for _ in range(6) for one in session.step()]
        except RunnerError:
            return False
        rest = 0.5 ** (6 * check_every)
        found = ended.computed.outputs["prediction"]
        np.testing.assert_allclose(found, [[2 * (1 - rest)], [3 * (1 - rest)]], rtol=1e-6)
        return True

    functions = ("cuMemAlloc", "cuMemHostAlloc", "cuMemcpyDtoDAsync", "cuMemsetD8Async", "cuMemcpyHtoDAsync")
    functions += ("cuMemcpyDtoHAsync", "cuStreamBeginCapture", "cuGraphInstantiateWithFlags", "cuGraphLaunch")
    outcomes = {}
    for function in functions:
        for nth in (1, 2, 3, 7, 10):
            with runners(bundle, cache) as both:
                software.fail(function, 2, nth, times=2)
                outcomes.setdefault(function, set()).add(play(both))
                software.clear()
                assert play(both), (function, nth)
    assert outcomes["cuStreamBeginCapture"] == outcomes["cuGraphInstantiateWithFlags"] == {True}
    assert all(False in outcomes[function] for function in ("cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync"))


def test_rows_beside_one_that_cannot_be_dropped_begin_anew(bundle, device_runners, software):
    loop = loop_of(bundle, device_runners)
    executor = LoopExecutor("full", loop, BatchAssembler(bundle.manifest.inputs, {}), max_rows=4, on_gpu=True)
    run = ContinuousRun(executor, Runs(1), 0, lambda: 0.0)
    values = (ENDLESS, 2, 1)
    dropped, *others = (Job(executor, {"xs": prompt(value)}, 1, options=limited(9)) for value in values)
    assert run.admit([dropped, *others]) == run.step() == []
    dropped.cancelled = True
    software.fail("cuMemcpyDtoDAsync", 2)  # when the last row moves to the place of the first
    assert run.step() == [dropped]
    software.clear()
    assert [job for _ in range(9) for job in run.step()] == others
    for job, value in zip(others, values[1:], strict=True):
        assert job.answer
        assert job.answer.outputs["prediction"].item() == value * (1 - 0.5**9)


async def test_a_server_answers_from_the_device(cache, tmp_path, software):
    nothing = software.live()
    random = np.random.default_rng(0)
    async with (
        running_here(tmp_path, lambda place: write_halving_bundle(place / NAME), cache, target="tensorrt") as ready,
        InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client,
    ):

        async def ask(value, tokens, max_loops):
            given = [triton_input("xs", prompt(value, tokens=tokens))]
            result = await client.infer(NAME, given, parameters={"max_loops": max_loops})
            loops = max_loops if value == ENDLESS else min(4, max_loops)
            assert result.as_numpy("loops").item() == loops
            assert result.as_numpy("prediction").item() == pytest.approx(value * (1 - 0.5**loops))

        await asyncio.gather(
            *(ask(float(random.choice([1, 2, ENDLESS])), *map(int, random.integers(1, [6, 30]))) for _ in range(200))
        )
        counts = shared_device().counts
        assert counts["launches"] > 10 * counts["captures"] > 0
    assert software.live() == nothing
