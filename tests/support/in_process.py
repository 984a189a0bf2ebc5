"""Servers in the process of the test, so that the test can inspect them."""

import asyncio
import os
import shutil
import signal
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np

from edge.pb import inference_pb2 as pb
from edge.repository.control import ModelControl
from edge.repository.loader import Loader, ServingOptions
from edge.repository.on_demand import OnDemand
from edge.repository.repository import Repository
from edge.scheduling.scheduler import Scheduler
from edge.server import serve
from edge.serving.inference import InferenceService
from edge.settings import Settings
from tests.support.models import ORACLE, ORACLE_BUNDLE, serialized, write_oracle_bundle
from tests.support.server_models import failing_graph, write_bundle_of


def write_oracle_and_failing_bundle(repository):
    """Write the oracle, and ``failing``: the element at ``index`` of three, and a runtime error beyond them."""
    shutil.copytree(ORACLE_BUNDLE, repository / "oracle")
    graph = failing_graph("element", np.array([7, 8, 9], np.int64))
    index = np.array([1], np.int64)
    write_bundle_of(repository, "failing", serialized(graph), {"index": index}, {"element": index + 7})


@asynccontextmanager
async def running_here(directory, write, cache=None, **options):
    """Run a server in this process, with all optional features, on bundles that ``write`` writes below a directory."""
    repository = directory / "repository"
    repository.mkdir()
    write(repository)
    options |= {"allow_shared_memory": True, "allow_log_settings": True}
    options |= {"grpc_port": 0, "metrics_port": None, "drain_seconds": 5}
    options = {"model_control": "explicit", "load_models": ("*",), **options}
    settings = Settings(repository=repository, cache=cache or directory / "cache", **options)
    ready = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve(settings, ready.set_result))
    await asyncio.wait({server, ready}, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield ready.result()
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        await server


@asynccontextmanager
async def serving_here(directory, transport=Settings.transport, **options):
    """Run a server as :func:`running_here` does, and yield a channel to it."""
    async with (
        running_here(directory, write_oracle_and_failing_bundle, transport=transport, **options) as ready,
        grpc.aio.insecure_channel(f"127.0.0.1:{ready.grpc_port}") as channel,
    ):
        yield channel


class Running(NamedTuple):
    """A service, its scheduler with one worker, its models, and the directory of their bundles."""

    service: InferenceService
    scheduler: Scheduler
    repository: Repository
    control: ModelControl
    directory: Path

    async def infer(self, request, deadline=None):
        """Send a copy of a request, because the service changes it."""
        return await self.service.infer(pb.ModelInferRequest.FromString(request.SerializeToString()), deadline)

    def model(self, name=ORACLE):
        return self.repository.ready(name, "")[1]

    def counted(self, name=ORACLE):
        return self.repository.find(name, "").statistics.snapshot()

    async def at_rest(self, name=ORACLE):
        """Wait until nothing of a model is in use, queued or undelivered; return False after ten seconds."""
        limit = time.monotonic() + 10
        while not (resting := self._rests(name)) and time.monotonic() < limit:
            await asyncio.sleep(0.001)
        return resting

    def _rests(self, name):
        pending = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        return not (self.model(name).use.users or len(self.scheduler.queue) or self.service._ended or pending)


@asynccontextmanager
async def running_service(
    directory,
    write=lambda repository: write_oracle_bundle(repository / "first"),
    *,
    target="onnxruntime",
    device_bound=False,
    mode="explicit",
    serving=None,
    pinned=(),
    max_loaded=None,
    budget=None,
    **options,
):
    """Write bundles into a repository below a directory, and serve them while the block runs."""
    scheduler = Scheduler(256, device_bound=device_bound)
    place = directory / "repository"
    place.mkdir(parents=True)
    write(place)
    on_demand = mode == "on-demand"
    loader = Loader(scheduler, target, directory / "cache", serving or ServingOptions(), budget)
    repository = Repository(place, loader, on_demand=on_demand, pinned=pinned)
    control = ModelControl(repository, mode, max_loaded=max_loaded)
    if on_demand:
        options["models"] = OnDemand(repository, control)
    try:
        await control.start(pinned if on_demand else None)
        yield Running(InferenceService(repository, scheduler, **options), scheduler, repository, control, place)
        await control.close()
    finally:
        scheduler.close()
