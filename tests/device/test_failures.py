"""Failures of the device and of its packages: a run fails alone, or the device is lost, and nothing leaks."""

import gc
import re
import sys
from contextlib import closing, contextmanager
from itertools import cycle

import numpy as np
import pytest

from edge.bundles.bundle import Bundle
from edge.errors import BackendError, RunnerError
from edge.runtimes import cuda
from edge.runtimes.cuda import facts, fatal
from edge.runtimes.runtime import Product, Source
from edge.runtimes.tensorrt.runtime import TensorRt
from tests.device.engines import STEP_PROFILE, affine, close_to, engine, loaded, reference, rows, running, some, step
from tests.support.commands import fewheads, refusal
from tests.support.models import ORACLE_BUNDLE

STICKY = (700, 719, 999)


class Scenario:
    """Everything that a runner of :func:`step` does, each time with the answer of ONNX Runtime."""

    def __init__(self, runner):
        self.runner = runner
        self.feeds = [{"state": some(2, seed), "token": some(2, seed + 1)} for seed in range(4)]
        self.answers = list(map(reference(step()), self.feeds))
        self.errors = []

    def play(self):
        """Infer until a graph is launched, with one and with two runs pending, then keep a state on the device."""
        self.errors.clear()
        for work in [self._one] * 3 + [self._two] * 3 + [self._kept] * 3:
            try:
                work()
            except RunnerError as error:  # noqa: PERF203
                self.errors.append(error)

    def _right(self, seed, outputs):
        assert close_to(outputs, self.answers[seed])

    def _one(self):
        self._right(0, self.runner.infer(self.feeds[0]))

    def _two(self):
        first, second = self.runner.start(self.feeds[1]), None
        try:
            second = self.runner.start(self.feeds[2])
        finally:
            try:
                self._right(1, first.result())
            finally:
                if second:
                    self._right(2, second.result())

    def _kept(self):
        outputs = self.runner.run({**self.feeds[3], "state": self.runner.upload(self.feeds[3]["state"])}, ["next"])
        assert isinstance(outputs["sum"], np.ndarray)
        self._right(3, {"next": outputs["next"].numpy(), "sum": outputs["sum"]})


def can_lack_memory(function):
    return not re.search("kernel|Free|Destroy|Release|PushCurrent|PopCurrent", function)


def few(count):
    """Return numbers of calls: the first ones, some between, and the last."""
    return sorted({*range(1, min(count, 8) + 1), *range(8, count, 5), count})


@contextmanager
def playing(data):
    with closing(loaded(data, mapped_bytes=16)) as runner:  # one output is mapped, and everything else is copied
        yield Scenario(runner)


def test_out_of_memory_in_any_call_of_a_run_fails_only_that_run(software, captured_bytes, caplog):
    data = engine(step(), STEP_PROFILE)
    with playing(data) as scenario:
        calls = software.counted(scenario.play) | {"kernel": 12}
        assert not scenario.errors
    assert {"cuMemcpyHtoDAsync", "cuGraphLaunch", "cuStreamBeginCapture", "cuMemAlloc"} <= {*calls}
    assert ("cuStreamWaitEvent" in calls) == (captured_bytes == 0)
    failed = set()
    for function in filter(can_lack_memory, calls):
        for nth in few(calls[function]):
            with playing(data) as scenario:
                software.fail(function, 2, nth)
                scenario.play()
                assert len(scenario.errors) < 3, (function, nth)
                assert not any(map(fatal, scenario.errors)), (function, nth)
                failed |= {function} if scenario.errors else set()
                software.clear()
                scenario.play()
                assert not scenario.errors, (function, nth)
    # Without graphs, and with one garbage collection, a run goes on.
    assert {*filter(can_lack_memory, calls)} - failed <= {
        "cuGraphInstantiateWithFlags", "cuStreamBeginCapture", "cuStreamEndCapture", "cuMemAlloc",
    }  # fmt: skip
    assert "runs without CUDA graphs" in caplog.text


def test_buffers_that_cannot_grow_leave_nothing_behind(software):
    right, small, large = reference(affine()), {"x": some(1)}, {"x": some(4)}
    with running(affine(), rows(1, 2, 4), preallocates=False) as runner:
        assert close_to(runner.infer(small), right(small))
        before = software.live()
        for function, nth in (("cuMemAlloc", 1), ("cuMemHostAlloc", 1), ("cuMemHostAlloc", 2)):
            software.fail(function, 2, nth, times=2)
            with pytest.raises(RunnerError, match="got a device out of memory"):
                runner.infer(large)
            gc.collect()
            assert software.live() == before, function
            software.clear()
        for feeds in (small, large, small):
            assert close_to(runner.infer(feeds), right(feeds))


def test_sticky_error_in_any_call_of_a_run_means_that_the_device_is_lost(software, capfd):
    codes = cycle(STICKY)
    data = engine(step(), STEP_PROFILE)
    with playing(data) as scenario:
        calls = software.counted(scenario.play) | {"kernel": 12}
    for function, count in calls.items():
        for nth in few(count):
            with playing(data) as scenario:
                software.fail(function, next(codes), nth)
                scenario.play()
                assert scenario.errors, (function, nth)
                assert fatal(scenario.errors[0]), (function, nth)
                assert len(scenario.errors) >= (10 - nth if function == "kernel" else 1)
                with pytest.raises(RunnerError):
                    scenario.runner.infer(scenario.feeds[0])
            # One for the injected error, if a destructor gets it, and one for the context.
            assert capfd.readouterr().err.count("PyCUDA WARNING") <= 2, (function, nth)
            software.reset()


@pytest.mark.parametrize("code", [2, 719])
def test_load_that_fails_in_any_call_leaks_nothing(software, code, capfd):
    large = engine(affine(64, depth=3), rows(1, 8, 32, width=64))
    runners = []
    calls = software.counted(lambda: runners.append(loaded(large)))
    runners.pop().close()
    for function in calls:
        for nth in few(calls[function]) if code != 2 or can_lack_memory(function) else []:
            before = software.live()
            software.fail(function, code, nth)
            if function == "cuMemAlloc" and code == 2:
                software.fail(function, code, nth + 1)  # pycuda collects garbage and tries again
            try:
                runner = loaded(large)
            except BackendError as error:
                assert ("m.onnx" in str(error), bool(fatal(error))) == (True, code != 2), (function, nth)  # noqa: PT017
            else:
                if code != 2:  # it was lost by the last call
                    with pytest.raises(RunnerError) as failed:
                        runner.infer({"x": some(8, width=64)})
                    assert fatal(failed.value), (function, nth)
                runner.close()
            if code == 2:
                assert software.live() == before, (function, nth)
                software.clear()
            else:
                software.reset()
    capfd.readouterr()


@pytest.fixture
def unknown_device():
    """Let the test find out about pycuda and the GPU anew."""
    for found in (cuda._import_driver, cuda.facts):
        found.cache_clear()
    yield
    for found in (cuda._import_driver, cuda.facts):
        found.cache_clear()


@pytest.mark.usefixtures("unknown_device")
def test_error_without_pycuda_says_how_to_install_it(monkeypatch):
    data = engine(affine(), rows(1, 2, 4))
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "pycuda.driver", None)
        for use in (TensorRt.version, lambda: TensorRt().cache_key(), lambda: loaded(data)):
            with pytest.raises(BackendError, match=r"^pycuda: .*Install the extra 'jetson'; .*--runtime nvidia"):
                use()
        judged = TensorRt.suitability()
    assert judged
    assert not judged.suitable
    assert judged.reason.startswith("TensorRT cannot be used here (pycuda: ")


def test_cache_key_contains_the_gpu(monkeypatch):
    found = facts()
    judged = TensorRt.suitability()
    assert judged
    assert judged.suitable
    assert f"runs on {found.name} of compute capability {found.compute_capability}" in judged.reason
    key = TensorRt().cache_key()
    assert key["version"] == TensorRt.version()
    assert (key["device_name"], key["compute_capability"], key["cuda"]) == found[:3]
    monkeypatch.setattr("edge.runtimes.tensorrt.runtime._LEAST_COMPUTE_CAPABILITY", (99, 0))
    with pytest.raises(
        BackendError, match=rf"got {found.name} of {found.compute_capability}, expected a GPU of .* 99\.0"
    ):
        TensorRt.version()


def test_error_without_a_gpu_names_the_nvidia_runtime(software):
    line = refusal(fewheads("build", ORACLE_BUNDLE, "--target", "tensorrt", SOFTWARE_CUDA_DEVICES="0"), 5)
    assert "CUDA: got cuInit failed: no CUDA-capable device is detected" in line
    assert "expected an NVIDIA GPU. Start a container with the nvidia runtime" in line


def test_error_of_a_broken_engine_says_how_to_build_it_again():
    bundle, data = Bundle.open(ORACLE_BUNDLE), engine(affine(), rows(1, 2, 4))
    source = Source.of(bundle, TensorRt())
    for broken in (b"", b"no engine", data[: len(data) // 2]):
        with pytest.raises(BackendError) as error:
            TensorRt().load(source, Product("model.engine", broken))
        assert str(error.value).startswith(f"engine of model {ORACLE_BUNDLE}/model.onnx: got ")
        # The cache holds it, so only --replace builds again.
        command = f"fewheads build {ORACLE_BUNDLE} --target tensorrt --replace"
        assert str(error.value).endswith(f"has built on this {facts().name}. Build it on this device: {command}")
