"""The queue and admission to it: order, limits, rejections with their numbers, and predictions for generated text."""

import asyncio
import time
from itertools import chain, repeat

import numpy as np
import pytest

from edge.errors import Overloaded
from edge.programs.generate import GenerationSession
from edge.programs.program import Options
from edge.programs.sampling import Sampling
from edge.scheduling.admission import Admission
from edge.scheduling.batching import BatchAssembler
from edge.scheduling.continuous import ContinuousRun
from edge.scheduling.job import Job
from edge.scheduling.queue import JobQueue
from edge.scheduling.runs import Run, Runs
from edge.scheduling.tier_executor import TextExecutor
from tests.support.in_process import running_service
from tests.support.jobs import executor_of, job_of, occupied
from tests.support.letters_model import (
    MAX_BATCH_SIZE,
    NAME,
    PROMPT,
    continued,
    inputs_of,
    text_of,
    text_request,
    write_letters_bundle,
)

NOW = 100.0
RETRY = "Send the request again later, or to another server."


def timed(tier="full", seconds=0.08, **options):
    """An executor with one known run of one row; deviations add an eighth of it while it waits, a quarter at last."""
    executor = executor_of(lambda rows: rows, tier, **options)
    executor.latency.observe(1, seconds)
    return executor


def queue_of(*jobs, max_jobs=100, max_bytes=10**6):
    queue = JobQueue(max_jobs, max_bytes)
    for job in jobs:
        queue.push(job)
    return queue


def runs_of(queue, now=NOW):
    return [[value for job in run for value in job.inputs["x"][:, 0]] for run in iter(lambda: queue.take(now), [])]


def check(admission, job, runs):
    admission.check(job, NOW, admission._queue.full(job.size_bytes), lambda: runs)


def test_queue_takes_runs_by_priority_and_arrival_and_never_mixes_tiers():
    full, lean = timed("full"), timed("lean", max_rows=4)
    alone = [job_of(full, number, priority=priority) for number, priority in enumerate((5, 10, 1, 5, 10))]
    joined = [job_of(lean, number, priority=priority) for number, priority in ((10, 5), (11, 10), (12, 2), (13, 5))]
    queue = queue_of(*alone, *joined)
    assert runs_of(queue) == [[2], [12, 10, 13, 11], [0], [3], [1], [4]]
    assert (len(queue), queue.size_bytes, queue.fullness, queue.take(NOW)) == (0, 0, 0, [])


def test_runs_have_preferred_sizes_and_wait_for_them():
    def waiting(*rows, limit=100, ready_at=NOW + 1):
        executor = timed(max_rows=limit, max_delay_seconds=1, preferred_rows=(2, 4))
        queue = queue_of(*(job_of(executor, *[index] * size) for index, size in enumerate(rows)))
        for index, job in enumerate(queue):
            job.ready_at = ready_at + index
        return queue

    queue = waiting(1, 1, 1, 1, 1, 1, 1)
    assert [len(run) for run in runs_of(queue)] == [4, 2]  # and a single one that waits for others
    assert (queue.ready_at(), len(runs_of(queue, NOW + 6.9)), len(runs_of(queue, NOW + 7))) == (NOW + 7, 0, 1)
    assert queue.ready_at() is None
    assert [waiting(*rows, limit=3).ready_at() for rows in ((1,), (1, 1), (3,), (1, 2))] == [NOW + 1, 0, 0, 0]
    assert runs_of(waiting(1, 1, 2, limit=3)) == [[0, 1], [2, 2]]
    for executor in (timed(), timed(max_rows=4, max_delay_seconds=1)):  # without a delay of the executor, or of the job
        assert queue_of(job_of(executor, 1)).ready_at() == 0


def test_queue_counts_what_waits_and_its_peaks():
    executor = timed()
    queue = queue_of(max_jobs=4, max_bytes=100)
    assert (queue.peak_jobs, queue.peak_bytes) == (0, 0)
    jobs = [job_of(executor, *range(rows)) for rows in (2, 3, 4)]
    states = []
    for change in (queue.push, queue.remove):
        for job in jobs:
            change(job)
            states.append((len(queue), queue.size_bytes, queue.fullness))
    assert states == [(1, 8, 0.25), (2, 20, 0.5), (3, 36, 0.75), (2, 28, 0.5), (1, 16, 0.25), (0, 0, 0)]
    assert (queue.peak_jobs, queue.peak_bytes) == (3, 36)
    assert not queue.remove(jobs[0])
    assert queue_of(job_of(executor, *range(15)), max_jobs=4, max_bytes=100).fullness == 0.6


def test_queue_gives_up_jobs_at_their_deadlines():
    executor = timed()
    late, later, patient = (job_of(executor, 0, deadline=deadline) for deadline in (NOW + 2, NOW + 1, None))
    queue = queue_of(late, later, patient)
    assert (queue.next_deadline(), queue.take_expired(NOW + 0.9)) == (NOW + 1, [])
    assert (queue.take_expired(NOW + 1), queue.next_deadline()) == ([later], NOW + 2)
    assert (queue.take_expired(NOW + 3), queue.next_deadline(), list(queue)) == ([late], None, [patient])


def test_predicted_finish_counts_the_runs_before_a_job():
    alone, joined = timed(), timed("lean", max_rows=4)
    for size in (2, 4):
        joined.latency.observe(size, 0.08 * size)
    # Before: 90 ms for each that runs alone, 360 ms for four rows that share a run. Its own: 100 ms, 400 ms.
    queue = queue_of(*(job_of(alone, 0, priority=priority) for priority in (1, 5, 5)))
    for job, before, own in (
        (job_of(alone, 0), 0.27, 0.1),
        (job_of(alone, 0, priority=4), 0.09, 0.1),
        (job_of(alone, 0, priority=10), 0.27, 0.1),
        (job_of(joined, 0, 0), 0.27, 0.2),
    ):
        assert queue.seconds_until_done(job) == pytest.approx((before, own))
    for priority in (5, 5, 5, 8, 8):
        queue.push(job_of(joined, 0, priority=priority))
    for job, before, own in (
        (job_of(joined, 0, priority=10), 0.27 + 0.36, 0.2),  # the sixth row, behind one run of four
        (job_of(joined, 0), 0.27, 0.4),  # the fourth of its run
        (job_of(joined, 0, 0), 0.27 + 0.36, 0.1),
        (job_of(joined, 0, priority=1), 0.09, 0.1),
        (job_of(alone, 0, priority=5), 0.27 + 3 * 0.09, 0.1),
        (job_of(alone, 0, priority=10), 0.27 + 0.36 + 0.09, 0.1),
    ):
        assert queue.seconds_until_done(job) == pytest.approx((before, own), rel=0.08)
    assert JobQueue(1, 1).seconds_until_done(job_of(executor_of(lambda rows: rows), 0)) == (0, 0)


def test_predicted_finish_adds_current_runs_delay_correction_and_return():
    executor = timed(max_rows=1, max_delay_seconds=0.5)
    queue = queue_of(job_of(executor, 0))
    job = job_of(executor, 0)
    # 50 ms are left of the first run, none of the second; the job waits 90 ms for another and runs 100 ms.
    runs = [Run(NOW - 0.05, executor, 1), Run(NOW - 0.3, executor, 1)]
    for instances, expected in ((1, 0.05 + 0.09 + 0.1), (2, (0.05 + 0.09) / 2 + 0.1)):
        admission = Admission(queue, instances, True)
        assert admission.finish_seconds(job, NOW, runs) == pytest.approx(expected + 0.5 + 0.001)
        admission.returns.observe(1, 0.008)
        assert admission.finish_seconds(job, NOW, runs) == pytest.approx(expected + 0.5 + 0.011)
        check(admission, job_of(executor, 0, deadline=NOW + 1), runs)
        assert admission.correction.factor(NOW) == 1
        job.deadline = NOW + 0.85
        check(admission, job, runs)
        assert job.estimate == pytest.approx((NOW, expected + 0.511, 0.85))
        admission.correction.answered(NOW + 0.9, job.estimate)
        factor = admission.correction.factor(NOW + 0.9)
        assert factor > 1.2
        assert admission.finish_seconds(job, NOW, runs) == pytest.approx(expected * factor + 0.511)
        check(admission, job, runs)
        assert job.estimate == pytest.approx((NOW, expected + 0.511 / factor, 0.85))  # without the correction


def rejected(admission, job, runs):
    with pytest.raises(Overloaded) as caught:
        check(admission, job, runs)
    return str(caught.value), caught.value.cause, caught.value.retry_after_ms


def test_rejections_give_the_numbers_and_the_time_to_come_back():
    executor, unknown = timed(), executor_of(lambda rows: rows)
    queue = queue_of(*(job_of(executor, 0, size_bytes=12) for _ in range(2)), max_jobs=3, max_bytes=40)
    admission, runs = Admission(queue, 1, True), [Run(NOW - 0.0491, executor, 1)]
    # 50.9 ms of the current run, 90 ms for each of two requests, 100 ms of its own run, 1 ms of return.
    expected = (f"queue: got 41 bytes with this request, expected at most 40. {RETRY}", "bytes", 332)
    assert rejected(admission, job_of(executor, 0, size_bytes=17), runs) == expected
    check(admission, job_of(executor, 0, size_bytes=16), runs)
    late = job_of(executor, 0, deadline=NOW + 0.2502)
    text = f"deadline: got an answer in 331.9 ms, as predicted, expected one in 250.2 ms. {RETRY}"
    assert rejected(admission, late, runs) == (text, "deadline", 82)
    check(Admission(queue, 1, False), late, runs)
    assert late.estimate is None
    late.deadline = NOW + 0.332
    check(admission, late, runs)
    assert late.estimate
    queue.push(job_of(executor, 0, size_bytes=16))
    expected = (f"queue: got 3 waiting requests, expected fewer than 3. {RETRY}", "requests", 322)
    assert rejected(admission, job_of(unknown, 0, size_bytes=0), runs) == expected
    just_late = job_of(unknown, 0, deadline=NOW + 0.0009)
    assert rejected(Admission(queue_of(), 1, True), just_late, [])[2] == 1


STEP_SECONDS, TOKEN_SECONDS, STALL_SECONDS = 0.01, 0.001, 0.3


@pytest.fixture
def executor(letters, letters_bundle):
    return TextExecutor("full", letters, BatchAssembler.of(letters_bundle.manifest), max_rows=MAX_BATCH_SIZE)


def job_for(executor, *prompts, max_tokens=12):
    sampling = Sampling(max_tokens)
    options = Options("full", sampling=sampling)
    return Job(executor, inputs_of(*prompts), len(prompts), options=options)


def test_steps_are_learnt_by_rows_and_prompts_by_their_size(executor):
    run = ContinuousRun(executor, Runs(1), 0, lambda: 0.0)
    # The first two share a run, in which three rows have 30 tokens.
    prompts = [[PROMPT * 10], ["a" * 28, "ab"], [PROMPT]]
    run.admit([job_for(executor, *own, max_tokens=3) for own in prompts])
    while run.jobs:
        run.step()
    known = [size for size in range(1, 400) if executor.latency.usual_seconds(size) is not None]
    assert known == [4]
    known = [size for size in range(1, 400) if executor.joins.usual_seconds(size) is not None]
    assert known == [3, *range(83, 99)]


def learnt(executor):
    for _ in range(200):
        for rows in range(1, MAX_BATCH_SIZE + 1):
            executor.latency.observe_step(rows, STEP_SECONDS)
        for size in (64, 128, 256):
            executor.joins.observe_step(size, TOKEN_SECONDS * size)


def test_predicted_finish_has_each_prompt_once(executor):
    learnt(executor)
    queue = JobQueue(100, 10**6)
    admission = Admission(queue, 1, True)

    def finish(job, *runs, first=False):
        return admission.finish_seconds(job, NOW, runs, first=first) - admission.return_seconds

    long = job_for(executor, "a" * 64)
    assert finish(long) == pytest.approx(64 * TOKEN_SECONDS + 11 * STEP_SECONDS)  # the prompt gives the first token
    for first_token in (finish(long, first=True), finish(job_for(executor, "a" * 64, max_tokens=1))):
        assert first_token == pytest.approx(64 * TOKEN_SECONDS)
    running = Run(NOW, executor, 128, job_for(executor, "a", max_tokens=5).options, rows=2)
    assert running.wait_seconds(long, NOW) == pytest.approx(128 * TOKEN_SECONDS + 4 * STEP_SECONDS)
    queue.push(job_for(executor, "a" * 64, "b", max_tokens=8))
    waiting = 128 * TOKEN_SECONDS + 2 * 7 / MAX_BATCH_SIZE * STEP_SECONDS
    assert finish(long) == pytest.approx(waiting + 64 * TOKEN_SECONDS + 11 * STEP_SECONDS)
    calls = [Run(NOW, executor, 128, joins=True), Run(NOW, executor, 3)]
    assert [call.call_seconds(0) for call in calls] == pytest.approx([128 * TOKEN_SECONDS, STEP_SECONDS])


def stalled_once(call):
    pauses = chain([STALL_SECONDS], repeat(0))
    return lambda *arguments: (time.sleep(next(pauses)), call(*arguments))[1]


def test_stall_of_a_measured_run_is_not_learnt(executor, monkeypatch):
    monkeypatch.setattr(executor.program, "session", stalled_once(executor.program.session))
    monkeypatch.setattr(GenerationSession, "step", stalled_once(GenerationSession.step))
    alone = executor_of(stalled_once(lambda rows: rows))
    for one, inputs in ((alone, {"x": np.zeros((1, 1), np.float32)}), (executor, inputs_of(PROMPT))):
        one.measure(inputs, 3)
        assert 0 < one.run_seconds(one.assembler.size(inputs)) < STALL_SECONDS


def test_steps_left_of_a_text_are_one_fewer_than_its_tokens(executor):
    options = job_for(executor, PROMPT, max_tokens=9).options
    assert [executor.repeats_left(options, done) for done in (0, 3, 8)] == [8, 5, 0]
    for _ in range(200):
        executor.learn(options, 4)
    # It has one token more than expected, or takes as many steps again, within its budget.
    assert [executor.repeats_left(options, done) for done in (1, 4, 6)] == pytest.approx([2, 4, 2])
    executor.latency.observe_step(1, STEP_SECONDS)
    assert executor.latency.seconds(1) == pytest.approx(3 * STEP_SECONDS)


def test_tokens_of_a_text_are_learnt_by_the_most_that_it_may_have(executor):
    texts = [Options("full", sampling=Sampling(most)) for most in (8, 64, 256)]

    def tokens():
        return [executor.repeats(text, 0.0) + 1 for text in texts]

    assert tokens() == [8, 64, 256]
    for _ in range(200):
        executor.learn(texts[0], 8)
    assert tokens() == pytest.approx([8, 64, 256])  # they used up all that they had
    for _ in range(200):
        executor.learn(texts[1], 16)
    assert tokens() == pytest.approx([8, 16, 64])
    executor.learn(texts[1], 24)
    assert tokens()[1] == pytest.approx(17)
    assert executor.repeats(texts[1], 2) + 1 == pytest.approx(17 + 2 * 8 / 4)


async def test_request_that_a_run_can_meet_is_admitted_whatever_its_prompt(tmp_path):
    def write(repository):
        return write_letters_bundle(repository / NAME)

    async with running_service(tmp_path, write, target="simulated:5") as running:
        long = (PROMPT * 32)[:90]
        with occupied(running.scheduler):
            task = asyncio.create_task(running.infer(text_request(long, max_tokens=5), time.monotonic() + 1.2))
            while not (len(running.scheduler.queue) or task.done()):
                await asyncio.sleep(0)
        assert text_of(await task) == continued(long, 5)
        await running.infer(text_request(PROMPT, "ab", max_tokens=7))
        runs = running.repository.find(NAME, "").statistics.runs()["full"]
        assert (runs.requests, runs.tokens) == (2, 5 + 2 * 7)
        assert runs.infer_ns >= (5 + 7) * 5e6  # with the runs of the prompts
