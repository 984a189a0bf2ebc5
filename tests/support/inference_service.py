"""An inference service with real models and a real scheduler, in the event loop of the test, without a transport."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from edge.instruments.snapshot import Snapshot
from edge.pb import inference_pb2 as pb
from edge.repository.control import ModelControl
from edge.repository.loader import Loader, ServingOptions
from edge.repository.model import Model
from edge.repository.repository import Repository
from edge.scheduling.scheduler import Scheduler
from edge.serving.inference import InferenceService
from tests.support.models import ORACLE, write_oracle_bundle


class Running(NamedTuple):
    """A service, its scheduler with one worker, its models, and the directory of their bundles."""

    service: InferenceService
    scheduler: Scheduler
    repository: Repository
    control: ModelControl
    directory: Path

    async def infer(self, request: pb.ModelInferRequest, deadline: float | None = None) -> pb.ModelInferResponse:
        """Send a copy of a request, because the service changes it."""
        return await self.service.infer(pb.ModelInferRequest.FromString(request.SerializeToString()), deadline)

    def model(self, name: str = ORACLE) -> Model:
        return self.repository.ready(name, "")[1]

    def counted(self, name: str = ORACLE) -> Snapshot:
        return self.repository.find(name, "").statistics.snapshot()

    async def at_rest(self, name: str = ORACLE) -> bool:
        """Wait until nothing of a model is in use, queued or undelivered; return False after ten seconds."""
        limit = time.monotonic() + 10
        while not (resting := self._rests(name)) and time.monotonic() < limit:
            await asyncio.sleep(0.001)
        return resting

    def _rests(self, name: str) -> bool:
        pending = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        return not (self.model(name).use.users or len(self.scheduler.queue) or self.service._ended or pending)


@asynccontextmanager
async def running_service(
    directory: Path,
    write: Callable[[Path], Any] = lambda repository: write_oracle_bundle(repository / "first"),
    *,
    target: str = "onnxruntime",
    device_bound: bool = False,
    mode: str = "explicit",
    serving: ServingOptions | None = None,
    **options: Any,
) -> AsyncIterator[Running]:
    """Write bundles into a repository below a directory, and serve them while the block runs."""
    scheduler = Scheduler(256, device_bound=device_bound)
    place = directory / "repository"
    place.mkdir(parents=True)
    write(place)
    repository = Repository(place, Loader(scheduler, target, directory / "cache", serving or ServingOptions()))
    control = ModelControl(repository, mode)
    try:
        await control.start()
        yield Running(InferenceService(repository, scheduler, **options), scheduler, repository, control, place)
        await control.close()
    finally:
        scheduler.close()
