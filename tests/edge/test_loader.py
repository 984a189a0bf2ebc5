"""Loading while other models serve: how long requests wait, builds, and failures that leave nothing behind."""

import asyncio
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from edge.bundles.bundle import Bundle
from edge.errors import BackendError, GoldenError, LoadFailed, ModelNotReady, NotFound
from edge.health.health import Health
from edge.instruments.memory import MemorySampler
from edge.programs.program import Options
from edge.repository import loader
from edge.repository.budget import MemoryBudget
from edge.repository.control import ModelControl
from edge.repository.loader import Loader
from edge.repository.repository import Repository
from edge.runtimes import cache, table
from edge.runtimes.build import build, load_runner
from edge.runtimes.onnxruntime import OnnxRuntimeCpu
from edge.runtimes.runtime import BuildProgress
from edge.scheduling.scheduler import Scheduler
from tests.support.boards import write
from tests.support.builds import children, pause_builds, wait_for_no_children
from tests.support.letters_model import MAX_TOKENS, write_letters_bundle
from tests.support.models import DATA, oracle_golden, write_oracle_bundle
from tests.support.text_model import write_sentiment_bundle


@pytest.fixture
def scheduler(request):
    scheduler = Scheduler(1, device_bound=getattr(request, "param", True))
    yield scheduler
    scheduler.close()


@pytest.mark.parametrize("scheduler", [True, False], indirect=True, ids=["device", "processor"])
def test_requests_run_between_the_loads_of_tiers(scheduler, tmp_path, monkeypatch, request):
    order = []
    threads = set()
    real = loader.load_with

    def load_with(*arguments):
        pool.submit(scheduler.call, lambda: order.append("request"))
        time.sleep(0.05)  # lets it reach the queue
        threads.add(threading.current_thread().name)
        order.append(arguments[3])
        return real(*arguments)

    bundle = write_sentiment_bundle(tmp_path / "sentiment")
    monkeypatch.setattr(loader, "load_with", load_with)
    made = Loader(scheduler, "onnxruntime", tmp_path / "cache")
    with ThreadPoolExecutor() as pool:
        model = made.load_model(bundle)
    assert list(model.tiers) == [tier.name for tier in bundle.manifest.tiers]
    if "device" in request.node.name:
        assert (order, threads) == (["full", "request", "lean", "request"], {"device-0"})
    else:
        assert (order, threads) == (["request", "full", "request", "lean"], {threading.current_thread().name})
    made.close(model)
    assert not model.use.take()


@pytest.mark.parametrize("scheduler", [True, False], indirect=True, ids=["device", "processor"])
def test_failed_load_closes_earlier_tiers(scheduler, tmp_path, monkeypatch):
    closed = []
    real = loader.load_with

    def load_with(*arguments):
        if arguments[3] == "lean":
            return real(arguments[0], Bundle.open(DATA / "broken_bundles" / "golden-wrong"), arguments[2])
        loaded = real(*arguments)
        monkeypatch.setattr(loaded.runner, "close", lambda: closed.append(threading.current_thread().name))
        return loaded

    bundle = write_sentiment_bundle(tmp_path / "sentiment")
    monkeypatch.setattr(loader, "load_with", load_with)
    with pytest.raises(GoldenError):
        Loader(scheduler, "onnxruntime", tmp_path / "cache").load_model(bundle)
    assert len(closed) == 1


NEXT = "calculator-oracle"


@pytest.fixture
def builds(monkeypatch):
    """Let ONNX Runtime build in a child process, as TensorRT does."""
    monkeypatch.setattr(OnnxRuntimeCpu, "isolated_build", True)


@pytest.fixture
async def unbuilt(scheduler, builds, tmp_path, monkeypatch):
    """Yield a repository of a model whose build pauses in the middle, and of a later one that is built."""
    write_sentiment_bundle(tmp_path / "repository" / "a-sentiment")
    build(write_oracle_bundle(tmp_path / "repository" / "z-oracle"), "onnxruntime", tmp_path / "cache")
    pause_builds(monkeypatch, tmp_path / "site")
    repository = Repository(tmp_path / "repository", Loader(scheduler, "onnxruntime", tmp_path / "cache"))
    control = ModelControl(repository, "explicit")
    yield control, repository
    await control.close()
    wait_for_no_children()
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]


async def building(repository, name):
    for _ in range(1000):
        found = [entry for entry in repository.named(name) if "%" in entry.reason]
        if found and children():
            return found[0]
        await asyncio.sleep(0.02)
    raise AssertionError([(entry.name, entry.state, entry.reason) for entry in repository])


@pytest.mark.parametrize("ending", ["unload", "unload after a load", "stop"])
async def test_other_models_serve_during_a_build_which_can_be_cancelled(unbuilt, ending):
    control, repository = unbuilt
    starting = asyncio.create_task(control.start())
    entry = await building(repository, "sentiment")
    assert entry.state == "LOADING"
    assert re.fullmatch(r"BUILDING \d+ %(, \d+ (s|min) left)? \(tier full\)", entry.reason)
    (other,) = repository.named(NEXT)
    computed = other.model.program.compute(oracle_golden().inputs, Options("full"))
    np.testing.assert_array_equal(computed.outputs["value"], oracle_golden().outputs["value"])
    if ending == "unload":
        await control.unload_model("sentiment")
        assert (entry.state, entry.reason) == ("UNAVAILABLE", "unloaded")
    elif ending == "unload after a load":
        child, loading = children(), asyncio.create_task(control.load_model("sentiment"))
        await asyncio.sleep(0.5)
        assert children() == child  # the load waits for the build
        await control.unload_model("sentiment")
        with pytest.raises(LoadFailed, match="got a request to end it"):
            await loading
        assert (entry.state, entry.reason) == ("UNAVAILABLE", "unloaded")
    else:
        control.stop()
    await starting
    wait_for_no_children()
    if ending == "stop":
        assert entry.state == "UNAVAILABLE"
        assert "got a request to end it, expected none. Load the model again." in entry.reason


async def test_reload_with_a_build_leaves_the_model_ready(unbuilt, scheduler, tmp_path):
    control, repository = unbuilt
    await control.start([NEXT])
    (entry,) = repository.named(NEXT)
    before = entry.model
    for path in (tmp_path / "cache").iterdir():
        shutil.rmtree(path)
    reloading = asyncio.create_task(control.load_model(NEXT))
    assert await building(repository, NEXT) is entry
    assert (entry.state, entry.model) == ("READY", before)
    assert not Health(repository, scheduler.runs).problems()
    await control.unload_model(NEXT)
    assert entry.state == "UNAVAILABLE"
    with pytest.raises(LoadFailed):
        await reloading


async def test_builds_that_are_off_or_impossible_are_explained(scheduler, builds, tmp_path, caplog):
    path = write_oracle_bundle(tmp_path / "repository" / "oracle").path
    cache = tmp_path / "cache"
    repository = Repository(path.parent, Loader(scheduler, "onnxruntime", cache, build=False))
    await ModelControl(repository, "none").start()
    (entry,) = repository
    assert f"fewheads build {path} --target onnxruntime --cache {cache}" in entry.reason
    with pytest.raises(BackendError, match="no build in"):  # before another model is evicted for it
        repository.loader.prepare(Bundle.open(path), print, threading.Event())
    cache.write_bytes(b"")
    repository = Repository(path.parent, Loader(scheduler, "onnxruntime", cache))
    await ModelControl(repository, "none").start()
    (entry,) = repository
    expected = f"expected a cache at {cache} that can be written. Give another directory"
    assert "models that are not in the cache cannot be built: --cache: got [Errno 17] File exists: " in caplog.text
    assert expected in caplog.text
    assert expected in entry.reason


async def test_unknown_model_is_not_ready_while_the_directory_is_read(scheduler, tmp_path):
    """Clients repeat a request that is not ready, and not one for an unknown model."""
    path = write_oracle_bundle(tmp_path / "repository" / "oracle").path
    repository = Repository(path.parent, Loader(scheduler, "onnxruntime", tmp_path / "cache"))
    with pytest.raises(ModelNotReady, match=r"got a server that still lists its models, expected READY\. Send the "):
        repository.find("calculator-oracle", "")
    await ModelControl(repository, "none").start()
    assert repository.find("calculator-oracle", "").state == "READY"
    with pytest.raises(NotFound):
        repository.find("other", "")


class Unable(OnnxRuntimeCpu):
    name = "unable"

    def load(self, source, built):
        raise BackendError(source.subject, given="this model", expected="another", fix="Take another runtime.")


async def test_auto_chooses_the_first_runtime_that_loads_the_model(scheduler, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(table, "RUNTIMES", {"unable": Unable, **table.RUNTIMES})
    bundle = write_oracle_bundle(tmp_path / "repository" / "oracle")
    repository = Repository(tmp_path / "repository", Loader(scheduler, cache=tmp_path / "cache"))
    control = ModelControl(repository, "none")
    await control.start()
    (entry,) = repository
    assert entry.model.runtime.name != "unable"
    reason = entry.model.runtime.reason
    assert reason.startswith("unable failed: ")
    assert "got 'this model', expected another. Take another runtime." in reason
    assert caplog.text.count(f"{bundle.path}: ") == 1
    await control.close()
    assert build(bundle, "auto", tmp_path / "cache").record.runtime != "unable"
    with pytest.raises(BackendError):
        load_runner(bundle, "unable", tmp_path / "cache")


def test_progress_ends_with_a_build_that_fails(scheduler, tmp_path, monkeypatch):
    def build_with(runtime, bundle, *_, progress, stop):
        progress(BuildProgress("compiling", 0.42))
        raise BackendError(str(bundle.path), given="this model", expected="another", fix="Take another runtime.")

    monkeypatch.setattr(table, "RUNTIMES", {"unable": Unable, **table.RUNTIMES})
    monkeypatch.setattr(Unable, "isolated_build", True)
    monkeypatch.setattr(loader, "build_with", build_with)
    reported = []
    made = Loader(scheduler, cache=tmp_path / "cache")
    made.close(made.load_model(write_oracle_bundle(tmp_path / "oracle"), reported.append))
    assert reported == ["BUILDING 42 %", ""]  # the next runtime's load has a time limit again


def test_a_build_is_read_once_and_a_broken_one_is_built_again(scheduler, builds, tmp_path, monkeypatch):
    reads = []
    real, runtime = cache.read_recorded, table.choose("onnxruntime")
    monkeypatch.setattr(cache, "read_recorded", lambda path, *rest: reads.append(path) or real(path, *rest))
    write(tmp_path, {"proc/meminfo": "MemAvailable: 15000 kB\n"})
    bundle, budget = write_oracle_bundle(tmp_path / "oracle"), MemoryBudget(MemorySampler(tmp_path, 1), 0)
    budget.learn(bundle, 10_000_000)  # so that there is memory for one load
    loader = Loader(scheduler, "onnxruntime", tmp_path / "cache", budget=budget)

    def progress():
        reported = []
        reads.clear()

        def report(text):
            reported.append(text.partition(" ")[0])
            with budget.reserved(bundle, runtime):  # a build reserves nothing
                pass

        loader.close(loader.load_model(bundle, report))
        return reported

    assert "BUILDING" in progress()
    (engine,) = (tmp_path / "cache").glob("*/model.onnx")
    assert reads == [engine]
    assert ("BUILDING" in progress(), reads) == (False, [engine])
    for broken in (b"", engine.read_bytes()[:-1] + b"?"):
        engine.write_bytes(broken)
        assert "BUILDING" in progress()
    assert "BUILDING" not in progress()


def test_golden_texts_have_a_length_of_their_own_and_must_be_repeated(scheduler, tmp_path):
    loader = Loader(scheduler, "onnxruntime", tmp_path / "cache")
    bundle = write_letters_bundle(tmp_path / "more", max_tokens=MAX_TOKENS + 8)
    loader.close(loader.load_model(bundle))
    texts = bundle.golden.outputs["text"]
    wrong = np.array([texts[0], [texts[1, 0][:-1] + b"?"]])
    bundle.goldens["full"] = msgspec.structs.replace(bundle.golden, outputs={**bundle.golden.outputs, "text": wrong})
    with pytest.raises(
        GoldenError, match=r"letters tier full output 'text' on golden row 1: got '\w+', expected '\w+\?'"
    ):
        loader.load_model(bundle)
