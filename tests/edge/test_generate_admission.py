"""Predictions for generated text: the run of its prompt by size, steps by rows, and tokens by ``max_tokens``."""

import asyncio
import time

import pytest

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
from tests.support.jobs import occupied
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

NOW, STEP_SECONDS, TOKEN_SECONDS = 100.0, 0.01, 0.001


@pytest.fixture
def executor(letters, letters_bundle):
    return TextExecutor("full", letters, BatchAssembler.of(letters_bundle.manifest), max_rows=MAX_BATCH_SIZE)


def job_of(executor, *prompts, max_tokens=12):
    sampling = Sampling(max_tokens)
    options = Options("full", sampling=sampling)
    return Job(executor, inputs_of(*prompts), len(prompts), options=options)


def test_steps_are_learnt_by_rows_and_prompts_by_their_size(executor):
    run = ContinuousRun(executor, Runs(1), 0, lambda: 0.0)
    # The first two share a run, in which three rows have 30 tokens.
    prompts = [[PROMPT * 10], ["a" * 28, "ab"], [PROMPT]]
    run.admit([job_of(executor, *own, max_tokens=3) for own in prompts])
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

    long = job_of(executor, "a" * 64)
    assert finish(long) == pytest.approx(64 * TOKEN_SECONDS + 11 * STEP_SECONDS)  # the prompt gives the first token
    for first_token in (finish(long, first=True), finish(job_of(executor, "a" * 64, max_tokens=1))):
        assert first_token == pytest.approx(64 * TOKEN_SECONDS)
    running = Run(NOW, executor, 128, job_of(executor, "a", max_tokens=5).options, rows=2)
    assert running.wait_seconds(long, NOW) == pytest.approx(128 * TOKEN_SECONDS + 4 * STEP_SECONDS)
    queue.push(job_of(executor, "a" * 64, "b", max_tokens=8))
    waiting = 128 * TOKEN_SECONDS + 2 * 7 / MAX_BATCH_SIZE * STEP_SECONDS
    assert finish(long) == pytest.approx(waiting + 64 * TOKEN_SECONDS + 11 * STEP_SECONDS)
    calls = [Run(NOW, executor, 128, joins=True), Run(NOW, executor, 3)]
    assert [call.call_seconds(0) for call in calls] == pytest.approx([128 * TOKEN_SECONDS, STEP_SECONDS])


def test_steps_left_of_a_text_are_one_fewer_than_its_tokens(executor):
    options = job_of(executor, PROMPT, max_tokens=9).options
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
            await asyncio.sleep(0.02)
        assert text_of(await task) == continued(long, 5)
        await running.infer(text_request(PROMPT, "ab", max_tokens=7))
        runs = running.repository.find(NAME, "").statistics.runs()["full"]
        assert (runs.requests, runs.tokens) == (2, 5 + 2 * 7)
        assert runs.infer_ns >= (5 + 7) * 5e6  # with the runs of the prompts
