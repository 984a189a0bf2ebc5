"""Loads that fail unexpectedly, never end, or do not fit into memory: the other bundles are served nevertheless."""

import asyncio
import math
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import msgspec
import numpy as np
import pytest

from edge.errors import BundleError, LoadFailed, RunStuck, UsageError
from edge.health import health
from edge.health.health import Health
from edge.instruments.memory import MemorySampler
from edge.launch import serving
from edge.pb import inference_pb2 as pb
from edge.repository import loader as loaders
from edge.repository.budget import MemoryBudget
from edge.repository.control import ModelControl
from edge.repository.load import LOAD_THREAD
from edge.repository.loader import Loader
from edge.repository.repository import Directory, Repository
from edge.runtimes import cache
from edge.runtimes.onnxruntime import OnnxRuntimeCpu
from edge.runtimes.table import choose
from edge.runtimes.tensorrt.runtime import TensorRt
from edge.scheduling.admission import CacheBudget
from edge.scheduling.scheduler import Scheduler
from edge.settings import TRANSPORTS
from tests.support.boards import write
from tests.support.letters_model import write_letters_bundle
from tests.support.metrics import reached, wait_until
from tests.support.models import write_oracle_bundle
from tests.support.server_models import write_busy_bundle, write_tiered_bundle
from tests.support.server_processes import model_states, problems, served

#: Many minutes on any machine.
FOR_EVER = 10**9


@pytest.fixture(autouse=True)
def _no_least(monkeypatch):
    monkeypatch.setattr(loaders, "LEAST_LOAD_SECONDS", 0.0)
    monkeypatch.setattr(loaders, "_BYTES_PER_SECOND", math.inf)


class Unexpected(Loader):
    """Raises what no part of a load should raise, for the bundles in a directory of one name."""

    broken = "broken"

    def load_model(self, bundle, *arguments):
        if bundle.path.name == self.broken:
            raise PermissionError(13, "Permission denied", "/root/.cache")
        return super().load_model(bundle, *arguments)


@contextmanager
def controlled(directory, mode, seconds=60.0, loader=Loader):
    device = Scheduler(8, device_bound=False)
    repository = Repository(directory, loader(device, "onnxruntime", directory.parent / "cache"))
    yield repository, ModelControl(repository, mode, seconds), Health(repository, device.runs)
    device.close()


def states(repository):
    return {entry.name: entry.state for entry in repository}


@pytest.mark.parametrize("mode", ["none", "poll", "explicit"])
async def test_unexpected_error_is_the_reason_of_its_bundle_alone(tmp_path, mode, caplog):
    for name in ("broken", "sound"):
        write_oracle_bundle(tmp_path / "repository" / name, name, 1)
    with controlled(tmp_path / "repository", mode, loader=Unexpected) as (repository, control, health):
        await control.start()
        reason = f"bundle {tmp_path / 'repository' / 'broken'}: got PermissionError: [Errno 13] Permission denied: "
        reason += "'/root/.cache', expected a bundle that can be loaded. The server's log has the traceback."
        assert states(repository) == {"broken": "UNAVAILABLE", "sound": "READY"}
        assert [entry.reason for entry in repository] == [reason, ""]
        assert health.problems() == [f"broken:1 is not served: {reason}"]
        assert "Traceback" in caplog.text
        if mode == "explicit":
            with pytest.raises(LoadFailed, match="PermissionError"):
                await control.load_model("broken")
            await control.unload_model("broken")
        if mode == "poll":
            polling = asyncio.create_task(control.poll(0.05))
            write_oracle_bundle(tmp_path / "repository" / "broken", "broken", 2, replace=True)
            write_oracle_bundle(tmp_path / "repository" / "third", "third", 1)
            await reached(lambda: states(repository).get("third") == "READY", 30)
            assert states(repository)["broken"] == "UNAVAILABLE"
        await control.close()
        if mode == "poll":
            await polling


def test_directories_that_cannot_be_read_have_errors_of_their_own(tmp_path):
    # A name that is too long fails for every user, as a directory without permission does for all but root.
    assert isinstance(Directory.read(tmp_path / ("x" * 300), "a"), BundleError)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="got Not a directory, expected a directory that this process's user may read"):
        Directory(tmp_path / "file").bundles()


def test_cache_that_cannot_be_looked_into_is_empty(tmp_path, monkeypatch):
    unreadable = tmp_path / ("x" * 300)
    assert cache.find(cache.entry(unreadable, {}), {}) is None
    assert cache.nearest(unreadable, dict.fromkeys(("onnx", "runtime", "tier", "role"), "")) is None
    write_oracle_bundle(tmp_path / "repository" / "a", "a", 1)
    with serving(tmp_path / "repository", cache=unreadable) as ready:
        assert ready.ready == ("a:1",)
    for variable in ("HOME", "FEWHEADS_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54_321)  # a user without an entry in /etc/passwd
    assert cache.cache_directory(None) == Path("/.cache/fewheads")


def number_of_loads():
    return [thread.name for thread in threading.enumerate()].count(LOAD_THREAD)


async def test_load_that_takes_too_long_delays_nobody(tmp_path):
    directory = tmp_path / "repository"
    write_busy_bundle(directory, steps=2500)  # four runs of half a second or more
    write_oracle_bundle(directory / "oracle", "oracle", 1)
    with controlled(directory, "explicit", 0.1) as (repository, control, health):
        await control.start()
        assert states(repository) == {"busy": "UNAVAILABLE", "oracle": "READY"}
        (problem,), loads = health.problems(), number_of_loads()
        assert problem == (
            f"busy:1 is not served: bundle {directory / 'busy-1'}: got no end of its load yet, expected one within "
            "0.1 s. It goes on. If it never ends, look at its golden inputs."
        )
        with pytest.raises(LoadFailed, match="no end of its load yet"):
            await control.load_model("busy")
        assert number_of_loads() <= loads  # it waited for the same load
        await control.unload_model("busy")
        assert ([entry.reason for entry in repository], health.problems()) == (["unloaded", ""], [])
        await control.close()
        await reached(lambda: not any(thread.name == LOAD_THREAD for thread in threading.enumerate()), 60)
        assert states(repository)["busy"] == "UNAVAILABLE"


def test_load_that_occupies_the_device_ends_the_server(scheduler, tmp_path, monkeypatch):
    bundle = write_busy_bundle(tmp_path, steps=1500)
    monkeypatch.setattr(OnnxRuntimeCpu, "thread_bound", True)
    loader = Loader(scheduler, "onnxruntime", tmp_path / "cache")
    read = health.Health(Repository(tmp_path, loader), scheduler.runs, watchdog_seconds=0.01).failure
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(loader.load_model, bundle)
        assert wait_until(lambda: isinstance(read(0.01), RunStuck))
        assert f"got a load of {bundle.path} that has occupied the device for" in str(read(0.01))
        model = loading.result()
    assert read(0.01) is None
    loader.close(model)


async def test_late_load_serves_when_it_ends(tmp_path):
    write_busy_bundle(tmp_path / "repository", steps=800)  # the load ends after the first look at it
    with controlled(tmp_path / "repository", "poll", 0.0) as (repository, control, health):
        await control.start()
        assert states(repository) == {"busy": "UNAVAILABLE"}
        await reached(lambda: states(repository) == {"busy": "READY"}, 60)
        assert health.problems() == []
        _, model = repository.ready("busy", "")
        assert model.runner.infer({"steps": np.array([2])})["done"] == [2]
        await control.close()


def test_load_that_never_ends_delays_no_shutdown(tmp_path):
    directory = tmp_path / "repository"
    write_busy_bundle(directory, steps=FOR_EVER)
    write_oracle_bundle(directory / "oracle", "oracle", 1)
    with served(directory, "--model-control=explicit", "--load-model=oracle") as server, ThreadPoolExecutor(1) as pool:
        load = pb.RepositoryModelLoadRequest(model_name="busy")
        loading = pool.submit(server.stub.RepositoryModelLoad, load)
        assert wait_until(lambda: model_states(server)["busy"][0] == "LOADING")
        code, log = server.stop()
        assert (code, "Traceback" in log) == (0, False), log
        assert loading.exception()


def test_directory_whose_name_is_not_utf_8_harms_nobody(tmp_path):
    directory = tmp_path / "repository"
    write_oracle_bundle(directory / "oracle", "oracle", 1)
    os.mkdir(os.fsencode(directory) + b"/bad\xff")
    with served(directory, "--model-control=explicit", "--load-model=*") as server:
        assert server.ready.ready == ("oracle:1",)
        assert list(server.ready.unavailable) == ["bad\\udcff"]
        assert f"file {directory}/bad\\udcff/manifest.json" in model_states(server)["bad\\udcff"][1]
        (problem,) = problems(server)
        assert problem.startswith("bad\\udcff is not served: ")
        (directory / "bad\udcff").rmdir()
        write_oracle_bundle(directory / "bad\udcff", "good", 1)
        server.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="bad\\udcff"))
        assert model_states(server)["good"] == ("READY", "")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_long_name_fits_into_the_status_and_the_log(tmp_path, transport):
    write_oracle_bundle(tmp_path / "repository" / "oracle", "oracle", 1)
    long = "\N{GRINNING FACE}\x1b[2J" * 7000  # 56 KB
    arguments = ("--model-control=explicit", "--load-model=*", "--log-level=debug", f"--transport={transport}")
    with served(tmp_path / "repository", *arguments) as server:
        stub = server.stub
        for call, request in (
            (stub.ModelInfer, pb.ModelInferRequest(model_name=long, id=long)),
            (stub.ModelMetadata, pb.ModelMetadataRequest(name=long)),
            (stub.ModelReady, pb.ModelReadyRequest(name="oracle", version=long)),
            (stub.RepositoryModelLoad, pb.RepositoryModelLoadRequest(model_name=long)),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(request)
            assert caught.value.code().name in ("NOT_FOUND", "INVALID_ARGUMENT")
            assert len(caught.value.details()) < 2000
        code, log = server.stop()
    assert (code, "\x1b" in log) == (0, False)
    assert "failed to load" in log
    assert len(log) < 40_000


MIB = 1024**2
RUNTIME = choose("onnxruntime")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_tiered_bundle(tmp_path_factory.mktemp("tiered") / "tiered")


def machine(root, available, limit=None, used=0, files=0):
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
    return MemorySampler(write(root, contents), 1)


def rejection(budget, bundle, runtime=RUNTIME):
    with pytest.raises(LoadFailed) as caught, budget.reserved(bundle, runtime):
        pass
    return str(caught.value)


def needed(budget, bundle, runtime=RUNTIME):
    """The MiB that a budget without any memory says that a bundle needs."""
    return int(re.findall(r"([\d,]+) MiB (?:as|estimated) ", rejection(budget, bundle, runtime))[0].replace(",", ""))


def test_rejection_gives_all_numbers(tmp_path, bundle):
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


def test_runs_at_once_share_the_weights_and_no_tensors(tmp_path, bundle):
    one, many = (needed(MemoryBudget(machine(tmp_path, 0), 0, instances), bundle) for instances in (1, 1 + 1024))
    # Four rows in, and one of an output of any number; both of 4 KiB.
    assert many - one == 1024 * 5 * 4 // 1024


def test_every_file_in_tensorrt_has_buffers_of_two_runs_on_host_and_device(tmp_path, bundle):
    def with_rows(rows):  # of 4 KiB
        (name, profile), *_ = bundle.manifest.profile.items()
        profiles = {name: msgspec.structs.replace(profile, max=(rows, *profile.max[1:]))}
        return replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, profile=profiles))

    budget, few, many = MemoryBudget(machine(tmp_path, 0), 0), with_rows(1), with_rows(1 + 1024)
    for runtime, times in ((RUNTIME, 1), (TensorRt(), 3 * 2 * 2)):
        assert needed(budget, many, runtime) - needed(budget, few, runtime) == 4 * times


def test_most_memory_of_earlier_loads_is_expected_again(tmp_path, bundle):
    budget = MemoryBudget(machine(tmp_path, 0), 0)
    budget.learn(bundle, 100 * MIB)
    budget.learn(bundle, 5 * MIB)  # it took over memory that the other had left
    assert needed(budget, bundle) == 103


def test_concurrent_loads_share_the_memory(tmp_path, bundle):
    budget = MemoryBudget(machine(tmp_path, 50), 0)
    with budget.reserved(bundle, RUNTIME):
        assert "of which 31 MiB are for others that are being loaded" in rejection(budget, bundle)
    with budget.reserved(bundle, RUNTIME):
        pass


def test_room_for_keys_and_values_stays_free_while_a_model_generates_text(tmp_path, bundle):
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
    reserved.give_back()
    budget.closed(letters.manifest)
    with budget.reserved(bundle, RUNTIME):
        pass


def test_lower_of_the_system_and_the_control_group_counts(tmp_path):
    for available, group, left, source in (
        (1000, (100, 90, 30), 40, "/sys/fs/cgroup memory.max"),
        (1000, (50, 90, 0), 0, "/sys/fs/cgroup memory.max"),
        (5, (100, 0, 0), 5, "/proc/meminfo MemAvailable"),
    ):
        found = machine(tmp_path, available, *group).available()
        assert (found.size_bytes, found.source) == (left * MIB, source)


def test_server_without_room_reports_it_and_keeps_its_models(tmp_path):
    repository = write_oracle_bundle(tmp_path / "repository" / "a", "oracle", 1).path.parent
    total = {reading.kind: reading.size_bytes for reading in MemorySampler().sample()}["system_total"]
    with served(repository, f"--memory-headroom-bytes={total}", "--model-control=explicit") as server:
        with pytest.raises(grpc.RpcError, match="memory for oracle:1: got ") as caught:
            server.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="oracle"))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        (model,) = server.stub.RepositoryIndex(pb.RepositoryIndexRequest()).models
        assert (model.state, "to be kept free" in model.reason) == ("UNAVAILABLE", True)


@pytest.mark.slow
def test_load_teaches_the_budget(scheduler, tmp_path, bundle):
    budget = MemoryBudget(machine(tmp_path, 2**20), 0)
    loader = Loader(scheduler, "onnxruntime", tmp_path / "cache", budget=budget)
    model = loader.load_model(bundle)
    machine(tmp_path, 0)
    with pytest.raises(LoadFailed, match="as it took before"):
        loader.load_model(bundle)
    loader.close(model)
