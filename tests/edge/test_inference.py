"""Calls without a transport: deadlines, cancellation, timings and counts; and the files that one enters on its way."""

import asyncio
import re
import sys
import threading
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import edge
from edge.errors import DeadlineExceeded, InvalidRequest
from edge.pb import inference_pb2 as pb
from edge.programs.program import Program
from edge.protocol import INFERENCE
from edge.repository.loader import ServingOptions
from edge.serving import inference
from tests.support.in_process import running_service, serving_here
from tests.support.jobs import WAIT, occupied
from tests.support.sample_requests import good, parameter, shaped, text
from tests.support.text_model import write_sentiment_bundle

CALLS, CANCELLED = 6, 2
NINE = np.float32(9).tobytes()


@pytest.fixture
async def running(tmp_path):
    async with running_service(tmp_path, target="simulated:20", device_bound=True) as running:
        yield running


class Held(Program):
    def __init__(self, program):
        self.entered, self.go = threading.Event(), threading.Event()
        self._program = program

    def compute(self, inputs, options):
        self.entered.set()
        assert self.go.wait(WAIT)
        return self._program.compute(inputs, options)


async def queued(running):
    """Queue calls behind a run, so that they share the next run."""
    calls = [asyncio.create_task(running.infer(good())) for _ in range(CALLS)]
    while len(running.scheduler.queue) < CALLS:
        await asyncio.sleep(0.001)
    return calls


async def while_queued(running):
    with occupied(running.scheduler):
        calls = await queued(running)
        calls[CANCELLED].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(running.scheduler.queue) == CALLS - 1
    return calls


def held_program(running):
    executor = running.model().executors["full"]
    executor.program = held = Held(executor.program)
    return held


async def while_running(running):
    held = held_program(running)
    with occupied(running.scheduler):
        calls = await queued(running)
    assert await asyncio.to_thread(held.entered.wait, WAIT)
    calls[CANCELLED].cancel()
    await asyncio.wait({calls[CANCELLED]})
    held.go.set()
    return calls


async def while_delivered(running, *, first):
    """Cancel in the turn of the event loop that delivers the answers, before or after them."""
    loop = asyncio.get_running_loop()
    schedule = loop.call_soon_threadsafe

    def with_cancel(deliver, *arguments, **options):
        def turn():
            steps = [lambda: deliver(*arguments), lambda: calls[CANCELLED].cancel()]
            for step in reversed(steps) if first else steps:
                step()

        ours = getattr(deliver, "__self__", None) is running.service
        return schedule(turn, **options) if ours else schedule(deliver, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        with occupied(running.scheduler):
            calls = await queued(running)
            patch.setattr(loop, "call_soon_threadsafe", with_cancel)
        await asyncio.wait(calls, timeout=10)
    return calls


STAGES = {
    "queued": while_queued,
    "running": while_running,
    "just before delivery": partial(while_delivered, first=True),
    "just after delivery": partial(while_delivered, first=False),
}


@pytest.mark.parametrize("stage", STAGES)
async def test_cancelled_call_harms_no_other(running, stage):
    calls = await STAGES[stage](running)
    _, pending = await asyncio.wait(calls, timeout=10)
    assert not pending
    others = [call for index, call in enumerate(calls) if index != CANCELLED]
    assert [call.result().raw_output_contents[0] for call in others] == [NINE] * len(others)
    assert calls[CANCELLED].cancelled()
    assert await running.at_rest()
    now = running.counted()
    assert now.success + sum(now.failures.values()) == CALLS
    if stage in ("queued", "running"):
        assert now.drops == {("Cancelled", stage): 1}
    assert now.execution_count == 1


async def test_failing_reply_affects_no_other_call(running, caplog):
    answered = []

    def reply(index, outcome):
        if index == CANCELLED:
            raise ZeroDivisionError("a transport's own")
        assert isinstance(outcome, pb.ModelInferResponse)
        answered.append(index)

    with occupied(running.scheduler):
        for index in range(CALLS):
            running.service.start(good(), None, lambda outcome, index=index: reply(index, outcome))
    assert await running.at_rest()
    assert answered == [index for index in range(CALLS) if index != CANCELLED]
    assert "a transport's own" in caplog.text
    assert (await running.infer(good())).raw_output_contents[0] == NINE


class Clock:
    """The module ``time`` with a monotonic clock that a test can stop."""

    perf_counter_ns = staticmethod(time.perf_counter_ns)
    now = None

    def monotonic(self):
        return time.monotonic() if self.now is None else self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(inference, "time", clock)
    return clock


@pytest.mark.parametrize(("left_seconds", "reason"), [(0.006, "Cancelled"), (0.004, "DeadlineExceeded")])
async def test_cancellation_within_5_ms_of_the_deadline_counts_as_exceeded(running, clock, left_seconds, reason):
    replies = []
    deadline = time.monotonic() + 60
    with occupied(running.scheduler):
        call = running.service.start(good(), deadline, replies.append)
        clock.now = deadline - left_seconds
        running.service.cancel(call)
        running.service.cancel(call)
    assert running.counted().drops == {(reason, "queued"): 1}
    assert not replies


@pytest.mark.parametrize(
    ("timeout_us", "client_seconds", "seconds", "timed"),
    [
        (0, None, 60, True),
        (0, 30, 30, False),
        (0, 60, 60, False),
        (0, 90, 60, True),
        (10_000_000, 30, 10, True),
        (70_000_000, None, 70, True),
    ],
)
async def test_earlier_of_client_deadline_and_server_limit_applies(
    tmp_path, clock, timeout_us, client_seconds, seconds, timed
):
    clock.now = time.monotonic()
    request = parameter("timeout", int64_param=timeout_us)
    async with running_service(tmp_path, target="simulated:20", default_timeout_seconds=60.0) as running:
        with occupied(running.scheduler):
            deadline = None if client_seconds is None else clock.now + client_seconds
            call = running.service.start(request, deadline, lambda outcome: None)
            assert call.deadline == pytest.approx(clock.now + seconds, abs=1e-6)
            assert (call.timer is not None) == timed
            if call.timer:
                assert call.timer.when() == pytest.approx(asyncio.get_running_loop().time() + seconds, abs=2)
            running.service.cancel(call)


async def test_server_limit_ends_a_running_call(running):
    held = held_program(running)
    begun_ns = time.perf_counter_ns()
    with pytest.raises(DeadlineExceeded) as caught:
        await running.infer(parameter("timeout", int64_param=500_000))
    elapsed_ns = time.perf_counter_ns() - begun_ns
    held.go.set()
    (waited_ms,) = re.findall(r"got ([0-9.]+) ms of waiting", str(caught.value))
    assert 500 <= float(waited_ms) <= elapsed_ns / 1e6
    now = running.counted()
    assert now.drops == {("DeadlineExceeded", "running"): 1}
    assert 500e6 <= now.fail_ns <= elapsed_ns
    assert await running.at_rest()


async def test_timings_of_answered_and_refused_requests(running):
    begun_ns = time.perf_counter_ns()
    timed = (await running.infer(parameter("timings", bool_param=True))).parameters
    with pytest.raises(InvalidRequest):
        await running.infer(shaped(1, 14))
    elapsed_ns = time.perf_counter_ns() - begun_ns
    times = {name: value.int64_param for name, value in timed.items()}
    stages = ("queue_ns", "compute_input_ns", "compute_infer_ns", "compute_output_ns")
    assert set(times) == {*stages, "request_ns"}
    assert min(times.values()) > 0
    assert sum(times[stage] for stage in stages) <= times["request_ns"] < elapsed_ns
    assert times["compute_infer_ns"] > 19e6  # the simulated run takes 20 ms
    now = running.counted()
    assert now.stages["request"].total == times["request_ns"]
    assert 0 < now.fail_ns < elapsed_ns


@pytest.mark.parametrize(("client_seconds", "count"), [(0.02, 2), (60, 1)])
async def test_late_return_of_an_expired_call_is_reported(running, monkeypatch, client_seconds, count):
    returned = []
    report = running.scheduler.returned
    monkeypatch.setattr(running.scheduler, "returned", lambda each: (returned.append(each), report(each)))
    deadline = time.monotonic() + client_seconds
    with occupied(running.scheduler):
        call = running.service.start(good(), deadline if count == 1 else deadline + 10, lambda outcome: None)
    while not call.computed_ns:  # without a turn of the event loop
        time.sleep(0.001)
    if count == 2:
        call.deadline = time.monotonic()
    running.service.cancel(call)
    assert len(returned) == count - 1
    assert await running.at_rest()
    assert len(returned) == count
    assert all(0 < seconds < 10 for seconds in returned)


@pytest.mark.parametrize(
    ("failure", "reply"),
    [
        (ValueError("of a program"), "ValueError('of a program')"),
        (KeyboardInterrupt(), "RuntimeError('KeyboardInterrupt in a run')"),
    ],
)
async def test_failing_run_fails_its_calls_alone(running, failure, reply):
    executor = running.model().executors["full"]
    working, executor.program = executor.program, type("Failing", (Program,), {"compute": Mock(side_effect=failure)})()
    replies = []
    assert running.service.start(good(), None, replies.append)
    while not replies:
        await asyncio.sleep(0.001)
    assert [repr(each) for each in replies] == [reply]
    executor.program = working
    assert (await running.infer(good())).raw_output_contents[0] == NINE
    now = running.counted()
    assert (now.fail, now.success) == (1, 1)


async def test_runs_that_end_together_wake_the_loop_once(running, monkeypatch):
    loop = asyncio.get_running_loop()
    spy = Mock(wraps=loop.call_soon_threadsafe)
    monkeypatch.setattr(loop, "call_soon_threadsafe", spy)
    replied = []
    for count in (1, 2):
        assert running.service.start(good(), None, replied.append)
        while len(running.service._ended) < count:  # without a turn of the event loop
            time.sleep(0.001)
    assert await running.at_rest()
    assert len(replied) == 2
    assert [getattr(call.args[0], "__self__", None) for call in spy.call_args_list].count(running.service) == 1


async def test_deadline_policy_uses_the_time_left(tmp_path, clock):
    def write(repository):
        write_sentiment_bundle(repository / "sentiment")

    options = {"target": "simulated:50", "device_bound": True, "serving": ServingOptions(policy="deadline")}
    async with running_service(tmp_path, write, **options) as running:
        for tier, seconds in (("full", 0.05), ("lean", 0.001)):
            running.model("sentiment").executors[tier].latency.observe(1, seconds)
        for left_seconds, reason in ((30, "full"), (0.03, "deadline")):
            deadline = time.monotonic() + 60
            clock.now = deadline - left_seconds
            answer = await running.infer(text("good"), deadline)
            assert answer.parameters["tier_reason"].string_param == reason


EDGE = str(Path(edge.__file__).parent)
#: Limit for a batched request, by transport: of a known form, and of a new one. CONTRIBUTING.md names the files.
MOST_FILES = {"grpcio": (14, 21), "nghttp2": (21, 29)}


@pytest.mark.parametrize("transport", MOST_FILES)
@pytest.mark.parametrize("known", [True, False])
async def test_batched_request_enters_few_files(tmp_path, monkeypatch, transport, known):
    files = set()
    recording = threading.Event()

    def walk(frame, event, argument):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(EDGE) and recording.is_set():
            files.add(name[len(EDGE) + 1 :])

    for period in ("health.supervisor._LOOK_SECONDS", "instruments.sampling._SAMPLE_SECONDS"):
        monkeypatch.setattr(f"edge.{period}", 60)  # what is done from time to time belongs to no request
    threading.setprofile(walk)
    sys.setprofile(walk)
    try:
        async with serving_here(tmp_path, transport, target="simulated:20") as channel:
            call = channel.unary_unary(f"/{INFERENCE}/ModelInfer")
            message = good().SerializeToString()
            if known:
                await call(message)
            else:
                await channel.unary_unary(f"/{INFERENCE}/ServerLive")(b"")  # connects
            await asyncio.sleep(0.2)
            recording.set()
            await asyncio.gather(*(call(message) for _ in range(3)))
            recording.clear()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    files -= {"runtimes/simulated.py"}  # around ONNX Runtime, as if it were a GPU
    assert len(files) <= MOST_FILES[transport][0 if known else 1], " ".join(sorted(files))
    assert {"serving/inference.py", "scheduling/runs.py", "scheduling/batching.py"} <= files  # it was joined
