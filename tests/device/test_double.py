"""Results and errors of the double; with ``-m gpu`` the same tests run on NVIDIA's TensorRT. See README.md."""

import ctypes
import gc
from contextlib import contextmanager

import numpy as np
import pytest

from tests.device.networks import BATCHES, CLASSES, FEATURES, build, classifier, model_of, probabilities

cuda = pytest.importorskip("pycuda.driver")
trt = pytest.importorskip("tensorrt")

LIBCUDA = ctypes.CDLL("libcuda.so.1")
THREAD_LOCAL_CAPTURE = 1
TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3, "int8": 1e-2}


class Logger(trt.ILogger):
    def __init__(self):
        super().__init__()
        self.errors = []

    def log(self, severity, message):
        if severity == trt.ILogger.ERROR:
            self.errors.append(message)


LOGGER = Logger()  # TensorRT keeps the first one of a process


@pytest.fixture(autouse=True)
def context():
    LOGGER.errors.clear()
    made = cuda.Device(0).retain_primary_context()
    made.push()
    yield made
    gc.collect()
    cuda.Context.pop()
    made.detach()


class Run:
    """An engine, an execution context without memory of its own, and buffers for the largest batch."""

    def __init__(self, data=None, dtype=np.float32, rows=None):
        data = build(trt, LOGGER, classifier(), BATCHES) if data is None else data
        self.engine = trt.Runtime(LOGGER).deserialize_cuda_engine(data)
        self.context = self.engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        self.stream = cuda.Stream(1)
        sizes = {"x": FEATURES, "y": CLASSES}
        self.host = {name: cuda.pagelocked_zeros((8, size), dtype) for name, size in sizes.items()}
        self.device = {name: cuda.mem_alloc(array.nbytes) for name, array in self.host.items()}
        self.arena = cuda.mem_alloc(max(self.engine.device_memory_size_v2, 1))
        if rows:
            self.prepare(rows)

    def prepare(self, rows, missing=0, addresses=("x", "y")):
        if rows:
            assert self.context.set_input_shape("x", (rows, FEATURES)), LOGGER.errors
        for name in addresses:
            assert self.context.set_tensor_address(name, int(self.device[name]))
        self.context.set_device_memory(int(self.arena), self.engine.device_memory_size_v2 - missing)

    def upload(self, x):
        rows = len(x)
        self.host["x"][:rows] = x
        cuda.memcpy_htod_async(self.device["x"], self.host["x"][:rows], self.stream)

    def enqueue(self, x):
        self.upload(x)
        return self.context.execute_async_v3(self.stream.handle)

    def result(self, rows):
        y = self.host["y"][:rows]
        cuda.memcpy_dtoh_async(y, self.device["y"], self.stream)
        self.stream.synchronize()
        return y.copy()


def batch(rows, seed=0):
    return np.random.default_rng(seed).integers(-64, 65, (rows, FEATURES)) / 64


@pytest.mark.parametrize("precision", TOLERANCE)
def test_an_engine_computes(precision):
    dtype = np.float16 if precision == "fp16" else np.float32
    run = Run(build(trt, LOGGER, classifier(precision), BATCHES), dtype)
    assert trt.nptype(run.engine.get_tensor_dtype("y")) == dtype
    for rows in (1, 8, 3):
        run.prepare(rows)
        assert tuple(run.context.get_tensor_shape("y")) == (rows, CLASSES)
        assert run.enqueue(batch(rows)), LOGGER.errors
        np.testing.assert_allclose(run.result(rows), probabilities(batch(rows)), atol=TOLERANCE[precision])


def test_two_profiles():
    large = {"x": ((5, FEATURES), (8, FEATURES), (8, FEATURES))}
    small = {"x": ((1, FEATURES), (1, FEATURES), (4, FEATURES))}
    run = Run(build(trt, LOGGER, classifier(), small, large))
    assert run.engine.num_optimization_profiles == 2
    assert [tuple(shape) for shape in run.engine.get_tensor_profile_shape("x", 1)] == list(large["x"])
    run.prepare(4)
    assert run.enqueue(batch(4))
    assert not run.context.set_input_shape("x", (8, FEATURES))
    assert "does not satisfy any optimization profiles" in LOGGER.errors[-1]
    assert run.context.set_optimization_profile_async(1, run.stream.handle)
    assert run.context.active_optimization_profile == 1
    assert run.context.infer_shapes() == ["x"]
    run.prepare(8)
    assert run.enqueue(batch(8))
    np.testing.assert_allclose(run.result(8), probabilities(batch(8)), atol=1e-5)
    assert not run.context.set_optimization_profile_async(2, run.stream.handle)


@pytest.mark.parametrize(
    ("name", "shape"),
    [*(("x", shape) for shape in [(9, FEATURES), (0, FEATURES), (4, FEATURES + 1), (4,)]), ("y", (4, 3)), ("z", (4,))],
)
def test_shapes_outside_the_engine_are_rejected(name, shape):
    run = Run()
    assert not run.context.set_input_shape(name, shape)
    assert LOGGER.errors


@pytest.mark.parametrize(
    ("labels", "shapes"), [("nn", (2, 1)), ("nm", (2, 3))], ids=["dimensions of one name", "a sum of two lengths"]
)
def test_contradictory_shapes_are_rejected_before_a_run(labels, shapes):
    model = model_of(f"sum (float[{labels[0]}] a, float[{labels[1]}] b) => (float[k] y) {{ y = Add(a, b) }}")
    data = build(trt, LOGGER, model, {name: ((1,), (2,), (4,)) for name in "ab"})
    run = trt.Runtime(LOGGER).deserialize_cuda_engine(data).create_execution_context()
    memory, stream = cuda.mem_alloc(1 << 10), cuda.Stream(1)
    for index, name in enumerate("aby"):
        assert run.set_tensor_address(name, int(memory) + 256 * index)
    for name, size in zip("ab", shapes, strict=True):
        assert run.set_input_shape(name, (size,))
    with pytest.raises(RuntimeError):
        run.infer_shapes()
    assert "Error Code 7: Internal Error" in LOGGER.errors[-1]
    with pytest.raises(ValueError, match="__len__"):
        tuple(run.get_tensor_shape("y"))
    LOGGER.errors.clear()
    assert not run.execute_async_v3(stream.handle)
    assert LOGGER.errors
    assert run.set_input_shape("b", (2,))
    assert not run.infer_shapes()
    assert run.execute_async_v3(stream.handle)
    stream.synchronize()


@pytest.mark.parametrize(
    ("prepared", "reason"),
    [
        ({"rows": 4, "addresses": ["y"]}, "Address is not set for input tensor x"),
        ({"rows": 4, "addresses": ["x"]}, "set for output tensor y"),
        ({"rows": 0}, ""),
        ({"rows": 4, "missing": 1}, ""),
    ],
)
def test_unprepared_runs_are_rejected(prepared, reason):
    run = Run()
    if not run.engine.device_memory_size_v2 and "missing" in prepared:
        pytest.skip("this engine needs no memory")
    run.prepare(**prepared)
    assert bool(LOGGER.errors) == ("missing" in prepared)
    assert not run.context.execute_async_v3(run.stream.handle)
    assert reason in LOGGER.errors[-1]


@pytest.mark.parametrize(
    ("module", "name", "value", "reason"),
    [
        ("engine", "VERSION_TEXT", "10.7.0", "expecting ['10.7.0', 8, 7]"),
        ("engine", "SERIALIZATION_VERSION", 1, "Version tag does not match. Note: Current Version: 1"),
        ("device", "compute_capability", lambda: (8, 6), "8, 6]"),
    ],
)
def test_engines_of_other_versions_and_devices_are_rejected(module, name, value, reason, software, monkeypatch):
    data = build(trt, LOGGER, classifier(), BATCHES)
    monkeypatch.setattr(f"tensorrt.{module}.{name}", value)
    assert trt.Runtime(LOGGER).deserialize_cuda_engine(data) is None
    assert reason in LOGGER.errors[-1]


def test_build_reports_nested_phases_and_can_be_cancelled():
    class Monitor(trt.IProgressMonitor):
        def __init__(self, limit):
            super().__init__()
            self.limit, self.open, self.steps = limit, [], 0

        def phase_start(self, phase_name, parent_phase, num_steps):
            assert parent_phase is None or parent_phase in self.open
            assert num_steps > 0
            self.open.append(phase_name)

        def step_complete(self, phase_name, step):
            assert phase_name in self.open
            self.steps += 1
            return self.steps < self.limit

        def phase_finish(self, phase_name):
            self.open.remove(phase_name)

    whole, stopped = Monitor(limit=1000), Monitor(limit=2)
    for monitor in (whole, stopped):
        configure = lambda config: setattr(config, "progress_monitor", monitor)  # noqa: B023, E731
        assert (build(trt, LOGGER, classifier(), BATCHES, configure=configure) is None) == (monitor is stopped)
        assert not monitor.open
    assert stopped.steps < whole.steps


def test_build_without_a_matching_profile_is_rejected():
    assert build(trt, LOGGER, classifier()) is None
    assert "no optimization profile has been defined" in LOGGER.errors[-1]
    wrong = FEATURES + 1
    assert build(trt, LOGGER, classifier(), {"x": ((1, wrong), (2, wrong), (4, wrong))}) is None
    assert "Dimension mismatch for tensor x and profile 0" in LOGGER.errors[-1]


@contextmanager
def captured(stream):
    """Capture into a graph; the list gets its executable. A failed capture leaves it empty."""
    graph, executable, found = ctypes.c_void_p(), ctypes.c_void_p(), []
    assert not LIBCUDA.cuStreamBeginCapture_v2(ctypes.c_void_p(stream.handle), THREAD_LOCAL_CAPTURE)
    yield found
    if not LIBCUDA.cuStreamEndCapture(ctypes.c_void_p(stream.handle), ctypes.byref(graph)):
        assert not LIBCUDA.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        assert not LIBCUDA.cuGraphDestroy(graph)
        found.append(executable)


def test_graph_repeats_a_run_with_the_current_contents_of_memory():
    run = Run(rows=4)
    assert run.enqueue(batch(4))
    with captured(run.stream) as graphs:
        assert run.context.execute_async_v3(run.stream.handle), LOGGER.errors
    assert run.context.set_input_shape("x", (2, FEATURES))  # the graph has its own
    run.stream.synchronize()
    run.upload(batch(4, seed=1))
    assert not LIBCUDA.cuGraphLaunch(graphs[0], ctypes.c_void_p(run.stream.handle))
    np.testing.assert_allclose(run.result(4), probabilities(batch(4, seed=1)), atol=1e-5)
    assert not LIBCUDA.cuGraphExecDestroy(graphs[0])


def test_capture_requires_a_run_before(software):
    run = Run(rows=4)
    with captured(run.stream) as graphs:
        assert not run.context.execute_async_v3(run.stream.handle)
    assert "not permitted when stream is capturing" in LOGGER.errors[-1]
    for graph in graphs:
        LIBCUDA.cuGraphExecDestroy(graph)


def destroyed_context(run):
    run.context.execute_async_v3(run.stream.handle)
    run.context = None


def shared_memory(run):
    """Let a run overtake one with the same memory on another stream."""
    run.other = run.engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    run.context, run.other = run.other, run.context
    run.prepare(4)
    run.context, run.other = run.other, run.context
    run.waiting = cuda.Stream(1)
    run.other.execute_async_v3(run.waiting.handle)


@pytest.mark.parametrize(
    ("misuse", "reason"),
    [
        (lambda run: run.device["x"].free(), "which are not all allocated"),
        (lambda run: run.context.set_tensor_address("y", int(run.arena)), "the activation memory changed during a run"),
        (lambda run: run.context.set_tensor_address("y", int(run.device["y"]) + 4), "is not aligned"),
        (destroyed_context, "after the context was destroyed"),
        (shared_memory, "two runs on unordered streams"),
    ],
)
def test_misuse_is_an_illegal_access(misuse, reason, software):
    from tensorrt import device

    device.faults.clear()
    run = Run(rows=4)
    misuse(run)
    if run.context:
        assert run.context.execute_async_v3(run.stream.handle)
    with pytest.raises(cuda.LogicError, match="illegal"):
        run.stream.synchronize()
    assert reason in device.faults[-1]


def test_context_keeps_its_engine_alive(software):
    before = software.live()["bytes"]
    run = Run(rows=4)
    loaded = software.live()["bytes"]
    run.engine = None
    assert software.live()["bytes"] == loaded
    assert run.enqueue(batch(4))
    run.result(4)
    del run
    assert software.live()["bytes"] == before


def test_destroying_an_engine_without_its_context_is_a_defect(context, software):
    from tensorrt import device

    engine = trt.Runtime(LOGGER).deserialize_cuda_engine(build(trt, LOGGER, classifier(), BATCHES))
    lost, _ = engine._weights
    cuda.Context.pop()
    del engine
    assert "could not be freed" in software.defects()[-1]
    software.clear()
    context.push()
    device.free(lost, "the test")
