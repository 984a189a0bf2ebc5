"""Padded runs on TensorRT: few shapes, each with a graph, and the answers of runs without padding."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from edge.programs.program import SingleRun
from edge.runtimes.tensorrt.device import shared_device
from edge.scheduling.batching import BatchAssembler
from edge.scheduling.job import Job
from edge.scheduling.latency import LatencyModel
from edge.scheduling.runs import Runs
from edge.scheduling.tier_executor import TierExecutor
from tests.device.engines import engine, loaded, reference
from tests.support import text_model

SHAPES = ((1, 1), (2, 8), (text_model.MAX_BATCH_SIZE, 16))


@pytest.mark.parametrize("measured", [False, True])
def test_runs_of_many_shapes_get_few_graphs_and_the_answers_of_runs_without_padding(measured: bool) -> None:
    onnx, most_rows, table = text_model.model("full"), text_model.MAX_BATCH_SIZE, LatencyModel()
    right, random = reference(onnx), np.random.default_rng(0)
    runner = loaded(engine(onnx, {"input_ids": SHAPES, "attention_mask": SHAPES}), mapped_bytes=0)
    try:
        assembler = BatchAssembler.of(text_model.manifest(), few_shapes=True, most_rows=most_rows, latency=table)
        executor = TierExecutor("full", SingleRun({"full": runner}), assembler, max_rows=most_rows, latency=table)
        runs = Runs(1)
        if measured:  # a device whose launches take all the time
            for size in [rows * tokens for rows in range(1, most_rows + 1) for tokens in (8, 12, 16)] * 32:
                table.observe(size, 1e-3)
        sizes = Counter[int]()
        for _ in range(120):
            lengths = random.integers(1, 17, int(random.integers(1, 5)))
            counts = random.integers(1, 3, len(lengths))
            jobs = []
            for count, length in zip(counts, lengths, strict=True):
                ids, mask = random.integers(1, 6, (count, length)), np.ones((count, length), np.int64)
                jobs.append(Job(executor, {"input_ids": ids, "attention_mask": mask}, int(count)))
            flight = runs.start(jobs, 0)
            assert flight
            sizes[flight.size] += 1
            assert runs.finish(flight, 0) == []
            for job in jobs:
                assert job.answer, job.error
                outputs, alone = job.answer.outputs, right(job.inputs)
                assert outputs.keys() == alone.keys()
                for name, array in alone.items():
                    np.testing.assert_allclose(outputs[name], array, rtol=1e-5, atol=1e-6)
        graphs = shared_device().counts["captures"]
        if measured:
            # All but one, which shows its own time, have 1, 2, 4 or 8 rows of 16 tokens.
            assert sum(sizes[size] for size in (16, 32, 64, 128)) >= 119
            assert graphs == 4
        else:
            assert len(sizes) > 10 < graphs
    finally:
        runner.close()
