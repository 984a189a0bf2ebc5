"""Loading while other models serve: how long requests wait, builds, failures that leave nothing behind, and memory."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest

from edge.bundles.bundle import Bundle
from edge.errors import BackendError, GoldenError, LoadFailed, ModelNotReady, NotFound
from edge.health.health import Health
from edge.instruments.memory import MemorySampler
from edge.pb import inference_pb2 as pb
from edge.programs.program import Options
from edge.repository import loader
from edge.repository.budget import MemoryBudget
from edge.repository.control import ModelControl
from edge.repository.entry import Entry
from edge.repository.loader import Loader
from edge.repository.repository import Repository
from edge.runner import Runner
from edge.runtimes import table
from edge.runtimes.build import build, load_runner
from edge.runtimes.onnxruntime import OnnxRuntimeCpu
from edge.runtimes.runtime import Product, Runtime, Source
from edge.runtimes.table import choose
from edge.runtimes.tensorrt.runtime import TensorRt
from edge.scheduling.admission import CacheBudget
from edge.scheduling.scheduler import Scheduler
from tests.support.builds import children, pause_builds, wait_for_no_children
from tests.support.letters_model import MAX_TOKENS, write_letters_bundle
from tests.support.models import DATA, oracle_golden, write_oracle_bundle
from tests.support.server_processes import served
from tests.support.text_model import write_sentiment_bundle
from tests.support.tiered_model import write_tiered_bundle


@pytest.fixture(params=[True, False], ids=["device", "processor"])
def scheduler(request: pytest.FixtureRequest) -> Iterator[Scheduler]:
    scheduler = Scheduler(1, device_bound=request.param)
    yield scheduler
    scheduler.close()


def test_requests_run_between_the_loads_of_tiers(
    scheduler: Scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    order: list[str] = []
    threads: set[str] = set()
    real = loader.load_with

    def load_with(*arguments: Any) -> Any:
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


def test_failed_load_closes_earlier_tiers(
    scheduler: Scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Any] = []
    real = loader.load_with

    def load_with(*arguments: Any) -> Any:
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
def builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ONNX Runtime build in a child process, as TensorRT does."""
    monkeypatch.setattr(OnnxRuntimeCpu, "isolated_build", True)


@pytest.fixture
async def unbuilt(
    scheduler: Scheduler, builds: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[ModelControl, Repository]]:
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


async def building(repository: Repository, name: str) -> Entry:
    for _ in range(1000):
        found = [entry for entry in repository.named(name) if "%" in entry.reason]
        if found and children():
            return found[0]
        await asyncio.sleep(0.02)
    raise AssertionError([(entry.name, entry.state, entry.reason) for entry in repository])


@pytest.mark.parametrize("ending", ["unload", "unload after a load", "stop"])
async def test_other_models_serve_during_a_build_which_can_be_cancelled(
    unbuilt: tuple[ModelControl, Repository], ending: str
) -> None:
    control, repository = unbuilt
    starting = asyncio.create_task(control.start())
    entry = await building(repository, "sentiment")
    assert entry.state == "LOADING"
    assert re.fullmatch(r"BUILDING \d+ %(, \d+ (s|min) left)? \(tier full\)", entry.reason)
    (other,) = repository.named(NEXT)
    assert other.model
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


async def test_reload_with_a_build_leaves_the_model_ready(
    unbuilt: tuple[ModelControl, Repository], scheduler: Scheduler, tmp_path: Path
) -> None:
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


async def test_builds_that_are_off_or_impossible_are_explained(
    scheduler: Scheduler, builds: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_oracle_bundle(tmp_path / "repository" / "oracle").path
    cache = tmp_path / "cache"
    repository = Repository(path.parent, Loader(scheduler, "onnxruntime", cache, build=False))
    await ModelControl(repository, "none").start()
    (entry,) = repository
    assert f"fewheads build {path} --target onnxruntime --cache {cache}" in entry.reason
    cache.write_bytes(b"")
    repository = Repository(path.parent, Loader(scheduler, "onnxruntime", cache))
    await ModelControl(repository, "none").start()
    (entry,) = repository
    expected = f"expected a cache at {cache} that can be written. Give another directory"
    assert "models that are not in the cache cannot be built: --cache: got [Errno 17] File exists: " in caplog.text
    assert expected in caplog.text
    assert expected in entry.reason


async def test_unknown_model_is_not_ready_while_the_directory_is_read(scheduler: Scheduler, tmp_path: Path) -> None:
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

    def load(self, source: Source, built: Product | None) -> Runner:
        raise BackendError(source.subject, given="this model", expected="another", fix="Take another runtime.")


async def test_auto_chooses_the_first_runtime_that_loads_the_model(
    scheduler: Scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(table, "RUNTIMES", {"unable": Unable, **table.RUNTIMES})
    bundle = write_oracle_bundle(tmp_path / "repository" / "oracle")
    repository = Repository(tmp_path / "repository", Loader(scheduler, cache=tmp_path / "cache"))
    control = ModelControl(repository, "none")
    await control.start()
    (entry,) = repository
    assert entry.model
    assert entry.model.runtime.name != "unable"
    reason = entry.model.runtime.reason
    assert reason.startswith("unable failed: ")
    assert "got 'this model', expected another. Take another runtime." in reason
    assert caplog.text.count(f"{bundle.path}: ") == 1
    await control.close()
    assert build(bundle, "auto", tmp_path / "cache").record.runtime != "unable"
    with pytest.raises(BackendError):
        load_runner(bundle, "unable", tmp_path / "cache")


MIB = 1024**2
RUNTIME = choose("onnxruntime")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_tiered_bundle(tmp_path_factory.mktemp("tiered") / "tiered")


def machine(root: Path, available: int, limit: int | None = None, used: int = 0, files: int = 0) -> MemorySampler:
    """A machine with so many MiB of memory, and perhaps a limit on the control group of the process."""
    contents = {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {available * 1024} kB\n"}
    if limit is not None:
        group = "sys/fs/cgroup/system.slice"
        contents |= {
            "proc/1/cgroup": "1:name=systemd:/x\n0::/system.slice/fewheads.service\n",
            f"{group}/memory.max": "max\n",
            f"{group}/memory.current": "1\n",
            f"{group}/fewheads.service/memory.max": f"{limit * MIB}\n",
            f"{group}/fewheads.service/memory.current": f"{used * MIB}\n",
            f"{group}/fewheads.service/memory.stat": f"anon 5\ninactive_file {files * MIB}\nactive_file 7\n",
        }
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return MemorySampler(root, 1)


def rejection(budget: MemoryBudget, bundle: Bundle, runtime: Runtime = RUNTIME) -> str:
    with pytest.raises(LoadFailed) as caught, budget.reserved(bundle, runtime):
        pass
    return str(caught.value)


def needed(budget: MemoryBudget, bundle: Bundle, runtime: Runtime = RUNTIME) -> int:
    """The MiB that a budget without any memory says that a bundle needs."""
    return int(re.findall(r"([\d,]+) MiB (?:as|estimated) ", rejection(budget, bundle, runtime))[0].replace(",", ""))


def test_rejection_gives_all_numbers(tmp_path: Path, bundle: Bundle) -> None:
    # Three tiers of a matrix of 4 MiB each, 2.3 times; one of them 0.8 times more while it is loaded.
    assert rejection(MemoryBudget(machine(tmp_path, 100), 90 * MIB), bundle) == (
        "memory for tiered:1: got 100 MiB available (/proc/meminfo MemAvailable), expected 121 MiB: 31 MiB estimated "
        "from its files, and 90 MiB to be kept free. Unload another model, serve fewer tiers or instances, or "
        "lower --memory-headroom-bytes."
    )
    assert "expected 101 MiB" in rejection(MemoryBudget(machine(tmp_path, 100), 70 * MIB), bundle)
    for fitting in (
        MemoryBudget(machine(tmp_path, 100), 68 * MIB),
        MemoryBudget(MemorySampler(tmp_path / "none", 1), 2**60),  # where nothing can be read
    ):
        with fitting.reserved(bundle, RUNTIME):
            pass


def test_runs_at_once_share_the_weights_and_no_tensors(tmp_path: Path, bundle: Bundle) -> None:
    one, many = (needed(MemoryBudget(machine(tmp_path, 0), 0, instances), bundle) for instances in (1, 1 + 1024))
    # Four rows in, and one of an output of any number; both of 4 KiB.
    assert many - one == 1024 * 5 * 4 // 1024


def test_every_file_in_tensorrt_has_buffers_of_two_runs_on_host_and_device(tmp_path: Path, bundle: Bundle) -> None:
    def with_rows(rows: int) -> Bundle:  # of 4 KiB
        (name, profile), *_ = bundle.manifest.profile.items()
        profiles = {name: msgspec.structs.replace(profile, max=(rows, *profile.max[1:]))}
        return replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, profile=profiles))

    budget, few, many = MemoryBudget(machine(tmp_path, 0), 0), with_rows(1), with_rows(1 + 1024)
    for runtime, times in ((RUNTIME, 1), (TensorRt(), 3 * 2 * 2)):
        assert needed(budget, many, runtime) - needed(budget, few, runtime) == 4 * times


def test_most_memory_of_earlier_loads_is_expected_again(tmp_path: Path, bundle: Bundle) -> None:
    budget = MemoryBudget(machine(tmp_path, 0), 0)
    budget.learn(bundle, 100 * MIB)
    budget.learn(bundle, 5 * MIB)  # it took over memory that the other had left
    assert needed(budget, bundle) == 103


def test_concurrent_loads_share_the_memory(tmp_path: Path, bundle: Bundle) -> None:
    budget = MemoryBudget(machine(tmp_path, 50), 0)
    with budget.reserved(bundle, RUNTIME):
        assert "of which 31 MiB are for others that are being loaded" in rejection(budget, bundle)
    with budget.reserved(bundle, RUNTIME):
        pass


def test_room_for_keys_and_values_stays_free_while_a_model_generates_text(tmp_path: Path, bundle: Bundle) -> None:
    letters, cache = write_letters_bundle(tmp_path / "letters"), CacheBudget(80 * MIB)
    budget = MemoryBudget(machine(tmp_path, 100), 0, cache=cache)
    with budget.reserved(bundle, RUNTIME):
        pass
    with suppress(ZeroDivisionError), budget.reserved(letters, RUNTIME):
        raise ZeroDivisionError
    with budget.reserved(bundle, RUNTIME):  # the other one is not loaded
        pass
    with budget.reserved(letters, RUNTIME), budget.reserved(letters, RUNTIME):  # the room is kept once
        pass
    assert rejection(budget, bundle).endswith(
        "expected 111 MiB: 31 MiB estimated from its files, 80 MiB for keys and values, and 0 MiB to be kept free. "
        "Unload another model, serve fewer tiers or instances, or lower --memory-headroom-bytes or --cache-mib."
    )
    budget.closed(letters.manifest)
    rejection(budget, bundle)
    reserved = cache.reserve("letters", 20 * MIB)
    with budget.reserved(bundle, RUNTIME):
        pass
    assert reserved
    reserved.give_back()
    budget.closed(letters.manifest)
    with budget.reserved(bundle, RUNTIME):
        pass


def test_lower_of_the_system_and_the_control_group_counts(tmp_path: Path) -> None:
    for available, group, left, source in (
        (1000, (100, 90, 30), 40, "/sys/fs/cgroup memory.max"),
        (1000, (50, 90, 0), 0, "/sys/fs/cgroup memory.max"),
        (5, (100, 0, 0), 5, "/proc/meminfo MemAvailable"),
    ):
        found = machine(tmp_path, available, *group).available()
        assert found
        assert (found.size_bytes, found.source) == (left * MIB, source)


@pytest.mark.slow
def test_load_teaches_the_budget(tmp_path: Path, bundle: Bundle) -> None:
    budget, device = MemoryBudget(machine(tmp_path, 2**20), 0), Scheduler(1, device_bound=False)
    loader = Loader(device, "onnxruntime", tmp_path / "cache", budget=budget)
    model = loader.load_model(bundle)
    machine(tmp_path, 0)
    with pytest.raises(LoadFailed, match="as it took before"):
        loader.load_model(bundle)
    loader.close(model)
    device.close()


def test_server_without_room_reports_it_and_keeps_its_models(tmp_path: Path) -> None:
    repository = write_oracle_bundle(tmp_path / "repository" / "a", "oracle", 1).path.parent
    total = {reading.kind: reading.size_bytes for reading in MemorySampler().sample()}["system_total"]
    with served(repository, f"--memory-headroom-bytes={total}", "--model-control=explicit") as server:
        with pytest.raises(grpc.RpcError, match="memory for oracle:1: got ") as caught:
            server.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="oracle"))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        (model,) = server.stub.RepositoryIndex(pb.RepositoryIndexRequest()).models
        assert (model.state, "to be kept free" in model.reason) == ("UNAVAILABLE", True)


def test_golden_texts_have_a_length_of_their_own_and_must_be_repeated(scheduler: Scheduler, tmp_path: Path) -> None:
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
