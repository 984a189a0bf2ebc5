"""The TensorRT runner: correct outputs for all shapes, graphs and pending runs, and failures that leak nothing."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from edge.errors import BackendError, InvalidRequest, RunnerError
from edge.programs.program import SingleRun
from edge.runner import OverlappingRunner
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from edge.runtimes.tensorrt import engine as tensorrt_engine
from edge.runtimes.tensorrt.device import shared_device
from edge.scheduling.batching import BatchAssembler
from edge.scheduling.job import Job
from edge.scheduling.latency import LatencyModel
from edge.scheduling.runs import Runs
from edge.scheduling.tier_executor import TierExecutor
from tests.device.engines import (
    MIXED,
    STEP_PROFILE,
    affine,
    close_to,
    engine,
    loaded,
    mixed,
    reference,
    rows,
    running,
    some,
    step,
)
from tests.device.networks import model_of
from tests.device.software import LAUNCH, SoftwareDriver, library
from tests.support import text_model

NUMPY = {"fp32": "float32", "fp16": "float16"}
TEXTS = dict.fromkeys(("input_ids", "attention_mask"), ((1, 1), (2, 8), (text_model.MAX_BATCH_SIZE, 16)))
MIXED_PROFILE = {name: ((1, 1), (2, 8), (4, 16)) for name in MIXED}


@pytest.mark.usefixtures("captured_bytes")
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("mapped_bytes", [0, 100, 1 << 20])
def test_outputs_are_those_of_onnx_runtime_for_every_datatype_and_shape(graphs, mapped_bytes):
    onnx = mixed()
    right = reference(onnx)
    random = np.random.default_rng(0)
    with running(onnx, MIXED_PROFILE, graphs=graphs, mapped_bytes=mapped_bytes) as runner:
        assert isinstance(runner, OverlappingRunner)
        assert {spec.name: (spec.datatype, spec.shape) for spec in runner.inputs} == {
            name: (name.upper(), (-1, -1)) for name in MIXED
        }
        for shape in [(1, 1), (4, 16), (2, 8), (3, 5)] * 4:
            feeds = {name: random.integers(-3, 3, shape).astype(NUMPY.get(name, name)) for name in MIXED}
            assert close_to(runner.infer(feeds), right(feeds))
        counts = shared_device().counts
        assert counts == ({"enqueues": 8, "captures": 4, "launches": 8} if graphs else {"enqueues": 16})


def test_each_shape_uses_the_smallest_profile_that_admits_it():
    onnx = affine()
    right = reference(onnx)
    # They overlap, and the larger one comes first.
    with running(onnx, rows(1, 8, 8), rows(1, 2, 2), rows(20, 20, 30)) as runner:
        for count in [1, 8, 2, 3, 20, 30, 1, 25, 8] * 2:
            feeds = {"x": some(count)}
            assert close_to(runner.infer(feeds), right(feeds))
            assert runner._engine
            assert runner._engine.profile_of(((count, 4),)) == (1 if count < 3 else 0 if count < 9 else 2)
        with pytest.raises(InvalidRequest) as error:
            runner.infer({"x": some(9)})
        assert str(error.value) == (
            "shapes for model m.onnx: got x [9, 4], expected x from [1, 4] to [8, 4] or x from [1, 4] to [2, 4] or "
            "x from [20, 4] to [30, 4]. Shorten or split the request, or export the bundle with a larger profile and "
            "build it again."
        )


def test_engine_with_fixed_shapes():
    onnx = model_of("fixed (float[2, 4] x) => (float[2, 4] y) { y = Add(x, x) }")
    with running(onnx) as runner:
        for _ in range(3):
            assert close_to(runner.infer({"x": some(2)}), reference(onnx)({"x": some(2)}))
        with pytest.raises(InvalidRequest, match=r"got FP32 \[1, 4\], expected FP32 \[2, 4\]"):
            runner.infer({"x": some(1)})


def test_requests_that_contradict_the_engine_are_rejected():
    with running(affine(), rows(1, 2, 4)) as runner:
        handles = [runner.upload(some(1).astype(datatype)) for datatype in (np.float32, np.int32)]
        # They differ in one thing from what has been computed.
        runner.infer({"x": some(1)})
        runner.run({"x": handles[0]}, ["y"])
        shared_device().counts.clear()
        wrong = [{}, {"x": some(1), "z": some(1)}, {"x": some(1).astype(np.float64)}, {"x": some(1)[0]}]
        for feeds in (*wrong, {"x": handles[1]}):
            with pytest.raises(InvalidRequest, match=r"m\.onnx"):
                runner.run(feeds, ["y"] * bool(feeds))
        with pytest.raises(InvalidRequest, match="got 'z', expected one of"):
            runner.run({"x": some(1)}, ["z"])
        with pytest.raises(InvalidRequest, match="got 'float64', expected one of"):
            runner.upload(np.zeros(1))
        assert not shared_device().counts


def test_contradictory_shapes_are_rejected_without_harm_to_other_runs(software):
    onnx = text_model.model("full")
    long, short = (np.ones((2, length), np.int64) for length in (16, 12))
    with running(onnx, TEXTS) as runner:
        right = {"input_ids": short, "attention_mask": short}
        wrong = {"input_ids": long, "attention_mask": short}
        for _ in range(3):
            pending = runner.start(right)
            with pytest.raises(InvalidRequest) as error:
                runner.infer(wrong)
            assert close_to(pending.result(), reference(onnx)(right))
            assert str(error.value).startswith(
                "shapes for model m.onnx: got input_ids [2, 16], attention_mask [2, 12], expected shapes that agree "
                "with each other; TensorRT says: IExecutionContext::inferShapes: Error Code 7"
            )
            assert "Condition '==' violated: 16 != 12" in str(error.value)
        assert shared_device().counts == {"enqueues": 2, "captures": 1, "launches": 1}
    data = engine(onnx, {**TEXTS, "attention_mask": ((1, 1), (2, 8), (8, 12))})
    before = software.live()
    with pytest.raises(BackendError, match=r"optimization profile 0 of model m\.onnx: .*whose largest shapes agree"):
        loaded(data)
    assert software.live() == before


@pytest.mark.parametrize("index", [-1, 6, 2**40])
@pytest.mark.parametrize("mapped_bytes", [0, 1 << 20])
def test_indices_outside_their_table_are_rejected_before_they_reach_the_device(index, mapped_bytes):
    onnx = text_model.model("full")
    options = {"index_limits": {"input_ids": len(text_model.WORDS)}, "mapped_bytes": mapped_bytes}
    with running(onnx, TEXTS, **options) as runner:
        feeds = {"input_ids": np.array([[0, 5]]), "attention_mask": np.array([[7, 7]])}
        wrong = {**feeds, "input_ids": np.array([[0, index]])}
        pending = runner.start(feeds)
        with pytest.raises(InvalidRequest) as error:
            runner.infer(wrong)
        assert str(error.value) == (
            f"input 'input_ids' of model m.onnx: got {index}, expected values from 0 to 5, the rows of a table of the "
            "model. Send the token ids of this model's own tokenizer."
        )
        for result in (pending.result(), runner.infer(feeds)):
            assert close_to(result, reference(onnx)(feeds))
        assert shared_device().counts["enqueues"] == 2


def test_recurring_shapes_get_graphs_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(tensorrt_engine, "GRAPHS", 3)
    monkeypatch.setattr(tensorrt_engine, "_STALE_RUNS", 4)
    monkeypatch.setattr(tensorrt_engine, "_OUTPUT_SHAPES", 2)
    onnx = affine()
    right = reference(onnx)
    with running(onnx, rows(1, 2, 8)) as runner:
        counts = shared_device().counts

        def runs(*counted):
            counts.clear()
            for count in counted:
                feeds = {"x": some(count, seed=count)}
                assert close_to(runner.infer(feeds), right(feeds))
            return dict(counts)

        assert runs(1, 2, 3, 4, 1, 2, 3, 4) == {"enqueues": 8}  # three others between two of a kind are too many
        assert runs(4, 3, 2) == {"enqueues": 3, "captures": 3}
        assert runs(4, 2, 3, 4) == {"launches": 4}
        assert runs(1, 1) == {"enqueues": 2}  # all graphs were used lately
        assert runs(1) == {"enqueues": 1, "captures": 1}  # in place of 2, which the last four runs did not use
        assert runs(3, 4, 1) == {"launches": 3}
        assert runs(2) == {"enqueues": 1}


@pytest.mark.parametrize("mapped_bytes", [0, 1 << 20])
def test_a_run_with_a_graph_takes_five_calls_of_the_driver(software, mapped_bytes):
    with running(mixed(), MIXED_PROFILE, mapped_bytes=mapped_bytes) as runner:
        feeds = {name: np.ones((2, 8), NUMPY.get(name, name)) for name in MIXED}
        for _ in range(2):
            runner.infer(feeds)
        assert software.counted_with_tensorrt(lambda: runner.infer(feeds)) == LAUNCH
    with running(mixed(), MIXED_PROFILE, mapped_bytes=mapped_bytes, graphs=False) as runner:
        runner.infer(feeds)
        counts = software.counted_with_tensorrt(lambda: runner.infer(feeds))
        # All inputs in one copy and all outputs in another; the context still has their shapes and addresses.
        assert counts["execute_async_v3"] == 1
        assert not {"set_input_shape", "set_tensor_address", "get_tensor_shape"} & {*counts}
        copies = {name: count for name, count in counts.items() if "Memcpy" in name}
        assert copies == ({} if mapped_bytes else {"cuMemcpyDtoHAsync": 1, "cuMemcpyHtoDAsync": 1})


def test_models_share_one_arena():
    small, large = affine(4), affine(64, seed=1, depth=3)
    with running(small, rows(1, 2, 4)) as first:
        shared = shared_device()
        feeds, right = {"x": some(2)}, reference(small)
        before = shared.arena.size_bytes
        for _ in range(3):
            assert close_to(first.infer(feeds), right(feeds))
        assert shared.counts["launches"] == 1
        with running(large, rows(1, 8, 32, width=64)) as second:
            assert shared_device() is shared
            assert shared.arena.size_bytes > before
            grown = shared.arena.size_bytes
            assert close_to(first.infer(feeds), right(feeds))  # its graph held the old address
            assert shared.counts["launches"] == 1
            many = {"x": some(32, width=64)}
            for _ in range(3):
                assert close_to(second.infer(many), reference(large)(many))
                assert close_to(first.infer(feeds), right(feeds))
            with running(small, rows(1, 1, 1)) as third:
                assert close_to(third.infer({"x": some(1)}), right({"x": some(1)}))
        assert shared.arena.size_bytes == grown
        assert close_to(first.infer(feeds), right(feeds))


@pytest.mark.usefixtures("captured_bytes")
@pytest.mark.parametrize("mapped_bytes", [0, 1 << 20])
def test_pending_runs_have_their_own_inputs_and_outputs(mapped_bytes):
    onnx, other = affine(), affine(seed=1)
    right, right_other = reference(onnx), reference(other)
    with (
        running(onnx, rows(1, 2, 4), mapped_bytes=mapped_bytes) as runner,
        running(other, rows(1, 2, 4), mapped_bytes=mapped_bytes) as second,
    ):
        kept = []
        for seed in range(6):
            feeds = [{"x": some(count, seed + count)} for count in (2, 2, 3, 3)]
            answers = [answer(each) for answer, each in zip([right, right_other] * 2, feeds, strict=True)]
            pending = [runner.start(feeds[0]), second.start(feeds[1]), runner.start(feeds[2]), second.start(feeds[3])]
            with pytest.raises(RuntimeError, match="2 runs are pending"):
                runner.start(feeds[0])
            for each in feeds:
                each["x"][:] = 0
            kept += zip([one.result() for one in pending], answers, strict=True)
            with pytest.raises(RuntimeError, match="has been taken"):
                pending[0].result()
        assert all(close_to(result, answer) for result, answer in kept)  # later runs do not overwrite it
        assert shared_device().counts["launches"] == 16


def test_state_stays_on_the_device_bit_for_bit(device):
    """Compare 50 steps of a loop with those that go through the host."""
    tokens = [some(2, seed) for seed in range(50)]
    with running(step(), STEP_PROFILE, mapped_bytes=0) as runner:
        state = some(2, seed=99)
        right = []
        for token in tokens:
            outputs = runner.infer({"state": state, "token": token})
            state = outputs["next"]
            right.append(outputs["sum"])
        handle = runner.upload(some(2, seed=99))

        def steps():
            nonlocal handle
            for token, expected in zip(tokens, right, strict=True):
                kept = runner.run({"state": handle, "token": token}, ["next"])
                handle = kept["next"]
                assert np.array_equal(kept["sum"], expected)
                assert (handle.datatype, handle.shape) == ("FP32", (2, 4))

        if device == "real":
            steps()
        else:
            # The tokens go in, the sums come out, and nothing else moves. Two runs alternate, and for each the driver
            # is called once without a graph, once beside its capture, and once in it.
            counts = SoftwareDriver(library()).copies(steps)
            assert counts == {"to": 6, "back": 6, "within": 0, "slices": 0}
        assert np.array_equal(handle.numpy(), state)
        assert shared_device().counts["launches"] > 90  # the loop alternates between few buffers
        all_kept = runner.run({"state": handle, "token": runner.upload(tokens[0])}, ["sum", "next"])
        assert {name: kept.shape for name, kept in all_kept.items()} == {"next": (2, 4), "sum": (2, 1)}


def test_memory_of_dropped_handles_is_reused(software):
    with running(step(), STEP_PROFILE) as runner:
        start = software.live()["device"]
        for count in [1, 2, 3, 4] * 6:
            kept = runner.run({"state": some(count), "token": some(count)}, ["next", "sum"])
            # Another thread may drop the last reference; the memory waits for the owner.
            with ThreadPoolExecutor(1) as dropping:
                dropping.submit(kept.clear).result()
        # Of 4 to 16 and of 16 to 64 bytes, rounded up to powers of two.
        assert software.live()["device"] - start == len([4, 8, 16, 32, 64])
        handles = [runner.upload(some(4)) for _ in range(30)]
        assert software.live()["device"] - start >= 30
        del handles
        runner.upload(some(4))
        assert software.live()["device"] - start <= 9


def test_handles_of_closed_or_other_runtimes_are_rejected():
    with running(step(), STEP_PROFILE) as runner:
        token = some(2)
        with running(step(), STEP_PROFILE) as other:
            handle = other.upload(some(2))
            runner.run({"state": handle, "token": token}, ["next"])
        with pytest.raises(InvalidRequest, match=r"'state'.*a handle of TensorRT whose runner is open"):
            runner.run({"token": token, "state": handle})
        with pytest.raises(RuntimeError, match="closed"):
            handle.numpy()
        cpu = OnnxRuntimeRunner(step(), subject="m")
        with pytest.raises(InvalidRequest, match="OnnxRuntimeHandle"):
            runner.run({"token": token, "state": cpu.upload(some(2))})
        with pytest.raises(InvalidRequest, match=r"got FP32 \[4, 2\]"):
            runner.run({"token": token, "state": runner.upload(some(2).reshape(4, 2))})


def test_only_the_thread_that_loaded_a_runner_may_use_it_until_it_is_closed():
    data = engine(affine(), rows(1, 2, 4))
    runner, feeds = loaded(data), {"x": some(1)}
    pending = runner.start(feeds)
    works = (lambda: runner.infer(feeds), pending.result, lambda: runner.upload(feeds["x"]), lambda: loaded(data))
    with ThreadPoolExecutor(1, "stranger") as stranger:
        errors = [str(stranger.submit(work).exception()) for work in works]
    assert errors == ["the GPU belongs to the thread MainThread, but stranger_0 uses it"] * 4
    assert close_to(pending.result(), reference(affine())(feeds))
    pending = runner.start(feeds)
    runner.close()
    runner.close()
    for use_closed in (lambda: runner.infer(feeds), pending.result):
        with pytest.raises(RuntimeError, match=r"m\.onnx is closed"):
            use_closed()


def test_output_larger_than_its_buffer_is_an_error():
    """``y`` has 10 - n rows for n rows of ``x``, so its buffer, made for the most rows of ``x``, is too small."""
    text = """shrinking (float[n, 4] x) => (float[rest] y) {
        rows = Shape<start = 0, end = 1>(x) fewer = Sub(ten, rows) zeros = Expand(zero, fewer)
        total = ReduceSum<keepdims = 0>(x) y = Add(zeros, total) }"""
    onnx = model_of(text, opset=18, ten=np.array([10]), zero=np.zeros(1, np.float32))
    with running(onnx, rows(1, 2, 8)) as runner:
        for _ in range(3):
            assert close_to(runner.infer({"x": some(8)}), reference(onnx)({"x": some(8)}))
            with pytest.raises(RunnerError):
                runner.infer({"x": some(1)})


@pytest.mark.parametrize("measured", [False, True])
def test_runs_of_many_shapes_get_few_graphs_and_the_answers_of_runs_without_padding(measured):
    onnx, most_rows, table = text_model.model("full"), text_model.MAX_BATCH_SIZE, LatencyModel()
    right, random = reference(onnx), np.random.default_rng(0)
    with running(onnx, TEXTS, mapped_bytes=0) as runner:
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
