"""Continuous batching in the scheduler, with loops in ONNX Runtime, beside runs of other models."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from edge.datatypes import Array
from edge.errors import ModelNotReady
from edge.instruments.snapshot import Timings
from edge.programs.loop import Loop, LoopSession
from edge.programs.program import Computed, Finished, LoopLimits, Options, Program
from edge.scheduling.batching import BatchAssembler
from edge.scheduling.job import Job
from edge.scheduling.queue import JobQueue
from edge.scheduling.scheduler import Scheduler
from edge.scheduling.tier_executor import LoopExecutor, TierExecutor
from tests.support.jobs import VALUES, Awaited, occupied, submitted
from tests.support.jobs import job_of as run_of
from tests.support.loop_model import ENDLESS, MAX_BATCH_SIZE, XS, prompt


@pytest.fixture
def executor(loop: Loop) -> TierExecutor:
    return LoopExecutor("full", loop, BatchAssembler(XS, {}), max_rows=MAX_BATCH_SIZE)


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler(max_queue_size=16)
    yield scheduler
    scheduler.close()


def job_of(executor: TierExecutor, *values: float, max_loops: int = 20, tokens: int = 3, **options: Any) -> Awaited:
    limits = Options("full", LoopLimits(max_loops, 0.1))
    return Awaited(executor, {"xs": prompt(*values, tokens=tokens)}, len(values), options=limits, **options)


def test_time_before_the_queue_is_not_taken_from_the_runtime(scheduler: Scheduler, executor: TierExecutor) -> None:
    prepared_ns = 10**12
    begun = time.perf_counter_ns()
    job = submitted(scheduler, job_of(executor, ENDLESS, timings=Timings(compute_input_ns=prepared_ns)))
    job.result()
    timings = job.timings
    assert timings.compute_input_ns > prepared_ns
    stages = (timings.queue_ns, timings.compute_input_ns - prepared_ns, timings.compute_infer_ns)
    assert min(stages) > 0
    assert sum(stages) <= time.perf_counter_ns() - begun


class Accelerator(Program):
    """Its device computes a run while the host prepares the next one."""

    def compute(self, inputs: Mapping[str, Array], options: Options) -> Computed:
        return self.start(inputs, options)()

    def start(self, inputs: Mapping[str, Array], options: Options) -> Callable[[], Computed]:
        return lambda: Computed({"y": inputs["x"]})


def test_loops_behind_a_run_on_the_device_keep_their_own_limits(scheduler: Scheduler, executor: TierExecutor) -> None:
    accelerated = TierExecutor("full", Accelerator(), BatchAssembler(VALUES, {}), on_gpu=True)
    with occupied(scheduler):
        submitted(scheduler, run_of(accelerated, 1))
        loops = [submitted(scheduler, job_of(executor, ENDLESS, max_loops=loops)) for loops in (3, 7)]
        last = submitted(scheduler, run_of(accelerated, 2))
    assert [job.result().outputs["loops"].tolist() for job in loops] == [[[3]], [[7]]]
    assert last.result().outputs["y"].tolist() == [[2]]


def test_runs_on_the_device_and_steps_of_a_loop_take_turns(scheduler: Scheduler, executor: TierExecutor) -> None:
    accelerated = TierExecutor("full", Accelerator(), BatchAssembler(VALUES, {}), on_gpu=True)
    with occupied(scheduler):
        loop = submitted(scheduler, job_of(executor, ENDLESS, max_loops=5))
        runs = [submitted(scheduler, run_of(accelerated, number)) for number in range(12)]
    loop.result()
    runs[-1].result()
    assert runs[2].computed_ns < loop.computed_ns < runs[6].computed_ns


def test_end_of_a_thread_ends_all_requests_of_a_step(scheduler: Scheduler, executor: TierExecutor) -> None:
    def publish(_: Job) -> None:
        raise ZeroDivisionError

    with occupied(scheduler):
        answered = submitted(scheduler, job_of(executor, ENDLESS, max_loops=1))
        streamed = submitted(scheduler, job_of(executor, ENDLESS, max_loops=9, partials=deque(), publish=publish))
    assert answered.result(5).outputs["loops"].tolist() == [[1]]
    assert isinstance(streamed.exception(5), ModelNotReady)


class Unplugged(Loop):
    """The device goes away in the first step of a session."""

    def session(self, options: Options) -> LoopSession:
        session = super().session(options)

        def step() -> list[Finished]:
            raise RuntimeError("cuGraphLaunch failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)")

        session.step = step  # type: ignore[method-assign]
        return session


def test_loss_of_the_device_refuses_the_requests_of_a_step(scheduler: Scheduler, loop: Loop) -> None:
    program = Unplugged(loop.config, loop._runners)
    executor = LoopExecutor("full", program, BatchAssembler(XS, {}), max_rows=MAX_BATCH_SIZE, on_gpu=True)
    with occupied(scheduler):
        jobs = [submitted(scheduler, job_of(executor, ENDLESS)) for _ in range(3)]
    assert [type(job.exception(5)) for job in jobs] == [ModelNotReady] * 3
    assert executor.failures.count == 0


def test_a_short_prompt_does_not_overtake_rows_that_wait_for_room(executor: TierExecutor) -> None:
    queue, wide, short = JobQueue(9, 10**6), job_of(executor, 1, 2), job_of(executor, 1, tokens=2)
    queue.push(wide)
    queue.push(short)
    assert queue.take(0.0, {executor: 1}) == []
    assert queue.take(0.0, {executor: 3}) == [wide, short]
