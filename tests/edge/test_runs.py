"""Runs record times, rows and answers of their jobs, and refuse more once the device is lost."""

import time

import numpy as np

from edge.errors import DeadlineExceeded, ModelNotReady
from edge.instruments.statistics import ModelStatistics
from edge.scheduling.runs import Runs
from tests.support.jobs import executor_of, job_of


def test_run_records_times_rows_and_nonfinite_answers():
    def work(rows):
        time.sleep(0.05)
        assert runs.now[0]
        current.append((runs.now[0].size, runs.now[0].executor is executor))
        return 1 / rows

    runs, statistics, executor = Runs(2), ModelStatistics(), executor_of(work, max_rows=4, repeats=2.0)
    current = []
    begun = time.perf_counter_ns()
    jobs = [job_of(executor, 2.0, 0.0, statistics=statistics), job_of(executor, 4.0)]
    time.sleep(0.02)
    executor.failures.mark_broken("before")
    with np.errstate(divide="ignore"):
        flight = runs.start(jobs, 0)
        assert flight
        assert runs.finish(flight, 0) == []
    took = time.perf_counter_ns() - begun
    assert (runs.now, current, executor.failures.count) == ([None, None], [(2, True)], 0)
    for job, values, bad in zip(jobs, ([0.5, np.inf], [0.25]), (("y",), ()), strict=True):
        assert job.answer
        assert (job.answer.outputs["y"].ravel().tolist(), job.answer.nonfinite) == (values, bad)
        assert job.answer.facts["x"].tolist() == job.inputs["x"][:, 0].tolist()
        assert (job.nonfinite, job.batch_rows, job.started) == (len(bad), 3, True)
        times = job.timings
        stages = (times.queue_ns, times.compute_input_ns, times.compute_infer_ns, times.compute_output_ns)
        assert all(stage > 0 for stage in stages)
        assert (times.queue_ns >= 20e6, times.compute_infer_ns >= 50e6) == (True, True)
        assert sum(stages) <= took
        assert job.queued_ns < job.computed_ns <= begun + took
    ((rows, batch),) = statistics.snapshot().batches.items()
    assert (rows, batch.count, batch.compute_infer_ns >= 50e6) == (3, 1, True)
    assert executor.latency.seconds(3) is None  # until the answers are on their way
    for _ in range(2):
        runs.learn(0)
    assert 0.05 <= (executor.latency.seconds(3) or 0) <= took / 1e9
    alone = job_of(executor, 1)
    runs.execute(alone, 0)
    assert (alone.error, alone.timings.compute_output_ns, alone.batch_rows) == (None, 0, 1)
    late = job_of(executor, 1, deadline=time.monotonic())
    assert (runs.start([late], 1), isinstance(late.error, DeadlineExceeded), late.started) == (None, True, False)
    illegal = RuntimeError("cuStreamSynchronize failed: an illegal memory access was encountered")

    def fail(rows):
        raise illegal

    runs.execute(job_of(executor_of(fail), 1), 1)
    assert not runs.lost  # it says nothing about a GPU
    runs.lose("it is gone")
    refused = job_of(executor, 1)
    runs.execute(refused, 1)
    assert (isinstance(refused.error, ModelNotReady), refused.ended, runs.now) == (True, True, [None, None])
    assert executor.failures.count == 0
