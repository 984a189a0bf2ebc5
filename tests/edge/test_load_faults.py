"""Bundles whose load fails in an unexpected way, or never ends: the other bundles are served nevertheless."""

import asyncio
import math
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from edge.errors import BundleError, LoadFailed, RunStuck, UsageError
from edge.health import health
from edge.health.health import Health
from edge.launch import serving
from edge.pb import inference_pb2 as pb
from edge.repository import loader as loaders
from edge.repository.control import LOAD_THREAD, ModelControl
from edge.repository.loader import Loader
from edge.repository.repository import Directory, Repository
from edge.runtimes import cache
from edge.runtimes.onnxruntime import OnnxRuntimeCpu
from edge.scheduling.scheduler import Scheduler
from edge.settings import TRANSPORTS
from tests.support.metrics import wait_until
from tests.support.models import write_oracle_bundle
from tests.support.server_models import write_busy_bundle
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


async def until(condition):
    while not condition():
        await asyncio.sleep(0.05)


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
            await asyncio.wait_for(until(lambda: states(repository).get("third") == "READY"), 30)
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
        await until(lambda: not any(thread.name == LOAD_THREAD for thread in threading.enumerate()))
        assert states(repository)["busy"] == "UNAVAILABLE"


def test_load_that_occupies_the_device_ends_the_server(tmp_path, monkeypatch):
    bundle = write_busy_bundle(tmp_path, steps=1500)
    monkeypatch.setattr(OnnxRuntimeCpu, "thread_bound", True)
    device = Scheduler(8)
    loader = Loader(device, "onnxruntime", tmp_path / "cache")
    read = health.Health(Repository(tmp_path, loader), device.runs, watchdog_seconds=0.01).failure
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(loader.load_model, bundle)
        assert wait_until(lambda: isinstance(read(0.01), RunStuck))
        assert f"got a load of {bundle.path} that has occupied the device for" in str(read(0.01))
        model = loading.result()
    assert read(0.01) is None
    loader.close(model)
    device.close()


async def test_late_load_serves_when_it_ends(tmp_path):
    write_busy_bundle(tmp_path / "repository", steps=800)  # the load ends after the first look at it
    with controlled(tmp_path / "repository", "poll", 0.0) as (repository, control, health):
        await control.start()
        assert states(repository) == {"busy": "UNAVAILABLE"}
        await asyncio.wait_for(until(lambda: states(repository) == {"busy": "READY"}), 60)
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
        os.kill(server.ready.process_id, signal.SIGTERM)
        code, log = server.end()
        assert (code, "Traceback" in log) == (0, False), log
        assert loading.exception()


@pytest.mark.parametrize("mode", ["none", "explicit"])
def test_directory_whose_name_is_not_utf_8_harms_nobody(tmp_path, mode):
    directory = tmp_path / "repository"
    write_oracle_bundle(directory / "oracle", "oracle", 1)
    os.mkdir(os.fsencode(directory) + b"/bad\xff")
    with served(directory, f"--model-control={mode}", *["--load-model=*"] * (mode == "explicit")) as server:
        assert server.ready.ready == ("oracle:1",)
        assert list(server.ready.unavailable) == ["bad\\udcff"]
        assert f"file {directory}/bad\\udcff/manifest.json" in model_states(server)["bad\\udcff"][1]
        (problem,) = problems(server)
        assert problem.startswith("bad\\udcff is not served: ")
        if mode == "explicit":
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
        server.process.terminate()
        code, log = server.end()
    assert (code, "\x1b" in log) == (0, False)
    assert "failed to load" in log
    assert len(log) < 40_000
