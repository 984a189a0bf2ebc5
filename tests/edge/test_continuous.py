"""Continuous batching of loops in the scheduler: turns with other runs, predictions, requests that join together."""

import time
from collections import deque

import pytest

from edge.errors import ModelNotReady, RunnerError
from edge.instruments.snapshot import Timings
from edge.programs.loop import Loop
from edge.programs.program import LoopLimits, Options
from edge.protocol import BY_DEADLINE, STOPPED
from edge.scheduling.admission import Admission
from edge.scheduling.batching import BatchAssembler
from edge.scheduling.continuous import ContinuousRun
from edge.scheduling.job import Job
from edge.scheduling.latency import LatencyEstimate, LoopEstimate
from edge.scheduling.queue import JobQueue
from edge.scheduling.runs import Run, Runs
from edge.scheduling.scheduler import Scheduler
from edge.scheduling.tier_executor import LoopExecutor, TierExecutor
from tests.support.jobs import VALUES, Awaited, Overlapping, executor_of, occupied, submitted
from tests.support.jobs import job_of as run_of
from tests.support.loop_model import ENDLESS, MAX_BATCH_SIZE, XS, prompt


@pytest.fixture
def executor(loop):
    return LoopExecutor("full", loop, BatchAssembler(XS, {}), max_rows=MAX_BATCH_SIZE)


def job_of(executor, *values, max_loops=20, tokens=3, **options):
    limits = Options("full", LoopLimits(max_loops, 0.1))
    return Awaited(executor, {"xs": prompt(*values, tokens=tokens)}, len(values), options=limits, **options)


def test_time_before_the_queue_is_not_taken_from_the_runtime(scheduler, executor):
    prepared_ns = 10**12
    begun = time.perf_counter_ns()
    job = submitted(scheduler, job_of(executor, ENDLESS, timings=Timings(compute_input_ns=prepared_ns)))
    job.result()
    timings = job.timings
    assert timings.compute_input_ns > prepared_ns
    stages = (timings.queue_ns, timings.compute_input_ns - prepared_ns, timings.compute_infer_ns)
    assert min(stages) > 0
    assert sum(stages) <= time.perf_counter_ns() - begun


def test_runs_on_the_device_and_steps_of_a_loop_take_turns(scheduler, executor):
    accelerated = TierExecutor("full", Overlapping(), BatchAssembler(VALUES, {}), on_gpu=True)
    with occupied(scheduler):
        loop = submitted(scheduler, job_of(executor, ENDLESS, max_loops=5))
        runs = [submitted(scheduler, run_of(accelerated, number)) for number in range(12)]
    loop.result()
    runs[-1].result()
    assert runs[2].computed_ns < loop.computed_ns < runs[6].computed_ns


def test_end_of_a_thread_ends_all_requests_of_a_step(scheduler, executor):
    def publish(_):
        raise ZeroDivisionError

    with occupied(scheduler):
        answered = submitted(scheduler, job_of(executor, ENDLESS, max_loops=1))
        streamed = submitted(scheduler, job_of(executor, ENDLESS, max_loops=9, partials=deque(), publish=publish))
    assert answered.result(5).outputs["loops"].tolist() == [[1]]
    assert isinstance(streamed.exception(5), ModelNotReady)


class Unplugged(Loop):
    def session(self, options):
        session = super().session(options)

        def step():
            raise RuntimeError("cuGraphLaunch failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)")

        session.step = step
        return session


def test_loss_of_the_device_refuses_the_requests_of_a_step(scheduler, loop):
    program = Unplugged(loop.config, loop._runners)
    executor = LoopExecutor("full", program, BatchAssembler(XS, {}), max_rows=MAX_BATCH_SIZE, on_gpu=True)
    with occupied(scheduler):
        jobs = [submitted(scheduler, job_of(executor, ENDLESS)) for _ in range(3)]
    assert [type(job.exception(5)) for job in jobs] == [ModelNotReady] * 3
    assert executor.failures.count == 0


def test_a_short_prompt_does_not_overtake_rows_that_wait_for_room(executor):
    queue, wide, short = JobQueue(9, 10**6), job_of(executor, 1, 2), job_of(executor, 1, tokens=2)
    queue.push(wide)
    queue.push(short)
    assert queue.take(0.0, {executor: 1}) == []
    assert queue.take(0.0, {executor: 3}) == [wide, short]


NOW = 100.0
STEP_SECONDS = 0.01  # of any size, without deviations


def test_loops_are_learnt_by_tolerance_and_bounded_by_the_budget():
    learnt = LoopEstimate()
    assert learnt.loops(LoopLimits(7, 0.1)) == 7
    tenth, budget = LoopLimits(100, 0.125), LoopLimits(5, 0.125)
    learnt.observe(tenth, 10)
    assert [learnt.loops(LoopLimits(most, 0.125)) for most in (1, 9, 100)] == [1, 9, 10]
    learnt.observe(tenth, 18)
    assert learnt.loops(tenth) == 11
    deviation = 10 / 8 + (8 - 10 / 8) / 4
    assert learnt.loops(tenth, 2) == pytest.approx(11 + 2 * deviation)
    learnt.observe(budget, 5)  # it was cut
    assert learnt.loops(tenth) == 11
    learnt.observe(LoopLimits(19, 0.125), 19)  # it was cut, too, but later
    assert learnt.loops(tenth) == 12
    assert [learnt.loops(LoopLimits(1000, tolerance)) for tolerance in (0.5, 1 / 64, 1e-30)] == [12, 24, 400]
    learnt.observe(LoopLimits(1000, 1 / 64), 14)
    assert learnt.loops(LoopLimits(1000, 1 / 128)) == pytest.approx(14 * 7 / 6)


@pytest.fixture
def timed(loop):
    timed = LoopExecutor("full", loop, BatchAssembler(XS, {}), max_rows=MAX_BATCH_SIZE)
    for rows in range(1, MAX_BATCH_SIZE + 1):
        for _ in range(200):
            timed.latency.observe_step(3 * rows, STEP_SECONDS)
    return timed


def limited(timed, rows, max_loops, **options):
    limits = LoopLimits(max_loops, 0.125)
    return Job(timed, {"xs": prompt(*[ENDLESS] * rows)}, rows, options=Options("full", limits), **options)


def test_predicted_finish_counts_loops_and_rows_side_by_side(timed):
    queue = JobQueue(100, 10**6)
    admission = Admission(queue, 1, True)

    def finish(job, *runs):
        return (admission.finish_seconds(job, NOW, runs) - admission.return_seconds) / STEP_SECONDS

    assert [finish(limited(timed, 1, loops)) for loops in (1, 10, 1000)] == pytest.approx([1, 10, 1000])
    for _ in range(200):
        timed.learn(Options("full", LoopLimits(1000, 0.125)), 50)
    assert [finish(limited(timed, 1, loops)) for loops in (1, 10, 1000)] == pytest.approx([1, 10, 50])
    queue.push(limited(timed, 3, 20))
    queue.push(limited(timed, 2, 1000))
    assert finish(limited(timed, 1, 1)) == pytest.approx((3 * 20 + 2 * 50) / MAX_BATCH_SIZE + 1)
    assert finish(limited(timed, 1, 1, priority=1)) == pytest.approx(1)


def test_predicted_finish_counts_what_is_left_of_the_running_rows(timed):
    run = ContinuousRun(timed, Runs(1), 0, lambda: 0.0)
    for _ in range(200):
        timed.learn(Options("full", LoopLimits(1000, 0.125)), 50)
    timed.latency.observe_step = lambda *_: None  # keep what is known

    def wait(rows):
        return run.wait_seconds(limited(timed, rows, 1), NOW) / STEP_SECONDS

    assert run.admit([limited(timed, 1, 20), limited(timed, 1, 1000)]) == []
    assert [wait(rows) for rows in (2, 3)] == pytest.approx([1, (20 + 50) / MAX_BATCH_SIZE])
    for _ in range(10):
        assert run.step() == []
    assert wait(3) == pytest.approx((10 + 40) / MAX_BATCH_SIZE)
    for _ in range(90):
        run.step()
    assert [wait(rows) for rows in (3, 4)] == pytest.approx([1, 100 / MAX_BATCH_SIZE])  # it may take as long again


def test_requests_that_join_together_are_embedded_in_one_run(timed, loop, monkeypatch):
    bad, shapes = 13.0, []
    embed = loop._runners["full"].embed

    def infer(feeds, infer=embed.infer):
        shapes.append(feeds["xs"].shape[:2])
        if bad in feeds["xs"]:
            raise RunnerError("embed", given=bad, expected="another value", fix="Send another value.")
        return infer(feeds)

    monkeypatch.setattr(embed, "infer", infer)
    values = {"a": 1.0, "b": bad, "longer": 1.5, "c": 2.0}
    jobs = {
        name: Job(timed, {"xs": prompt(value, tokens=5 if name == "longer" else 3)}, 1)
        for name, value in values.items()
    }
    run = ContinuousRun(timed, Runs(1), 0, lambda: 0.0)
    assert run.admit(list(jobs.values())) == [jobs["b"]]
    assert shapes == [(3, 3), (1, 3), (1, 3), (1, 3), (1, 5)]  # each alone after a failure
    assert isinstance(jobs["b"].error, RunnerError)
    assert timed.failures.count == 1
    ended = [job for _ in range(9) for job in run.step()]
    assert {name for name, job in jobs.items() if job in ended} == {"a", "c", "longer"}
    for name in ("a", "c", "longer"):
        assert jobs[name].answer.outputs["prediction"].item() == values[name] * 15 / 16
    shapes.clear()
    run = ContinuousRun(timed, Runs(1), 0, lambda: 0.0)
    assert run.admit([Job(timed, {"xs": prompt(value)}, 1) for value in (1, 2)]) == []
    assert shapes == [(2, 3)]


def test_a_worker_with_loops_may_run_other_models_beside_them(timed):
    other = executor_of(lambda rows: rows)
    loops = ContinuousRun(timed, Runs(1), 0, lambda: 0.0)
    own, plain = Run(NOW, timed, 3, timed.options), Run(NOW, other, 1)
    scheduler = Scheduler(10)
    (worker,) = scheduler._workers
    idle = scheduler._idle[:]
    for continuous, run, expected in (
        ((), None, []),
        ((), plain, [plain]),
        ((), own, [own]),
        ((loops,), own, [loops]),
        ((loops,), plain, [loops, plain]),
    ):
        scheduler._idle.clear()
        worker.continuous, worker.run = continuous, run
        assert scheduler._current_runs() == expected
    worker.continuous, scheduler._idle[:] = (), idle
    scheduler.close()


def test_a_loop_that_is_cut_late_counts_as_a_wrong_prediction(timed):
    for _ in range(200):
        timed.latency.observe_step(3, 60.0)
    for left, wait in ((30.0, 0.0), (0.02, 0.03)):
        run = ContinuousRun(timed, Runs(1), 0, lambda: 0.0)
        now = time.monotonic()
        job = limited(timed, 1, 1000, deadline=now + left, best_effort=True)
        job.estimate = LatencyEstimate(now, left / 2, left)
        assert run.admit([job]) == run.step() == []
        time.sleep(wait)
        assert run.step() == [job]
        assert job.answer.facts[STOPPED].tolist() == [BY_DEADLINE]
        assert (job.estimate is None) is (wait == 0)
