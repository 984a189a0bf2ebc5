"""Continuous batching in the scheduler, with loops in ONNX Runtime."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from edge.instruments.snapshot import Timings
from edge.programs.loop import Loop, LoopRunners
from edge.programs.program import LoopLimits, Options
from edge.runtimes.build import load_runner
from edge.scheduling.batching import BatchAssembler
from edge.scheduling.scheduler import Scheduler
from edge.scheduling.tier_executor import TierExecutor
from tests.support.jobs import Awaited, submitted
from tests.support.loop_model import ENDLESS, MAX_BATCH_SIZE, XS, prompt, write_halving_bundle


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    bundle = write_halving_bundle(tmp_path_factory.mktemp("loop") / "halving")
    cache = tmp_path_factory.mktemp("cache")
    embed, step = (load_runner(bundle, "onnxruntime", cache, role=role).runner for role in ("embed", "step"))
    yield Loop(bundle.manifest.program, {"full": LoopRunners(embed, step)})  # type: ignore[arg-type]
    embed.close()
    step.close()


@pytest.fixture
def executor(loop: Loop) -> TierExecutor:
    return TierExecutor("full", loop, BatchAssembler(XS, {}), max_rows=MAX_BATCH_SIZE)


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
