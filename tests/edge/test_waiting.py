"""Requests that wait for models: their limits and deadlines, who may cause a load, and how they count."""

import asyncio

import numpy as np
import pytest

from edge.errors import DeadlineExceeded, Overloaded, PermissionDenied
from edge.health.health import Health
from edge.pb import inference_pb2 as pb
from edge.security.access import INFER, Access
from edge.security.rate import Rate, RateLimit
from edge.serving.call import MESSAGE, Arrival, Received
from edge.serving.metadata import Metadata
from edge.serving.request import InputTensor, UncheckedRequest
from edge.serving.waiting import Waiting
from tests.support.metrics import reached
from tests.support.on_demand_models import ask, request_to, serving
from tests.support.secured_servers import tokens_file


async def test_waiting_requests_take_half_of_the_queue_and_keep_their_places(tmp_path, loads):
    loads.held = "a"
    async with serving(tmp_path, 2) as running:
        await ask(running, "b")
        queue = running.scheduler.queue
        queue.max_jobs = 7
        waiting = [asyncio.create_task(ask(running, "a")) for _ in range(3)]
        await reached(lambda: loads["a"])
        refusal = "queue: got half of its 7 places taken by requests that wait for models, expected room in that half"
        with pytest.raises(Overloaded, match=refusal):
            await ask(running, "a")
        assert await running.service.threads.run(0, lambda: "room for others") == "room for others"
        queue.max_jobs = 3  # as if others took the other half
        for work in (ask(running, "a"), running.service.threads.run(0, lambda: None)):
            with pytest.raises(Overloaded, match="queue: got 3 waiting requests, expected fewer than 3"):
                await work
        assert queue.full(0) == "requests"  # also for requests to models that are loaded
        queue.max_jobs, queue.max_bytes = 99, 2 * queue.held_bytes + 1
        with pytest.raises(
            Overloaded, match=r"queue: got half of its \d+ bytes taken by requests that wait for models"
        ):
            await ask(running, "a")
        queue.max_bytes = queue.held_bytes + 1
        with pytest.raises(Overloaded, match=r"queue: got \d+ bytes with this request, expected at most \d+"):
            await ask(running, "a")
        queue.max_jobs, queue.max_bytes = 3, queue.held_bytes
        loads.goes_on.set()
        await asyncio.gather(*waiting)  # there is room for what has waited
        assert running.counted("a").drops == {("Overloaded", "requests"): 2, ("Overloaded", "bytes"): 2}
        assert (queue.held_jobs, queue.held_bytes) == (0, 0)


async def test_a_model_is_described_within_the_limits_of_requests(tmp_path, loads):
    """Whoever asks what a model is loads it, and evicts another one."""
    secrets = tokens_file(tmp_path / "tokens", grafana=["metrics"])
    limit = RateLimit(Rate(0.001, 1))
    async with serving(tmp_path, 1, limit=limit, default_timeout_seconds=0.05) as running:
        metadata = Metadata(
            running.repository,
            running.scheduler,
            Health(running.repository, running.scheduler.runs),
            service=running.service,
        )
        asked = pb.ModelMetadataRequest(name="a")
        access = Access(tmp_path / "tokens")
        for describe in (metadata.model_metadata, metadata.model_config):
            refusal = "load of model 'a': got token 'grafana' with the scope metrics, expected the scope infer"
            with pytest.raises(PermissionDenied, match=refusal):
                await describe(asked, lambda: access.authorize(f"Bearer {secrets['grafana']}", INFER))
        loads.held = "a"
        with pytest.raises(DeadlineExceeded):
            await metadata.model_metadata(asked)
        with pytest.raises(Overloaded, match="requests of this client"):
            await metadata.model_metadata(asked)
        assert running.scheduler.queue.held_jobs == 0
        loads.goes_on.set()
        await running.service.load_waits._models.ready("a", "")
        assert (await metadata.model_metadata(asked)).name == "a"  # a loaded one is described to everyone


async def test_bytes_of_a_waiting_request_are_those_that_it_holds(tmp_path):
    async with serving(tmp_path, 1) as running:
        entry, large = running.repository.find("a", ""), b"x" * 2**20
        arrival = Arrival("", print, MESSAGE, None, 0, None)

        def waiting(request, contents=(), key=b""):
            return Waiting(Received(request, contents, key, None, arrival), entry)

        texts = np.array([large, b"short"], np.object_)
        held = waiting(
            UncheckedRequest("a", "", "", {}, [InputTensor("t", "BYTES", (2,), {}, texts)], [], json_bytes=7)
        )
        assert held.size_bytes == texts.nbytes + 7  # of the JSON that its texts are from; none of them is looked at
        message = request_to("a")
        message.raw_input_contents.append(large)
        message.ClearField("raw_input_contents")  # the message keeps its memory
        key = message.SerializeToString(deterministic=True)
        held = waiting(message, [large], key)
        assert held.size_bytes == len(large) + len(key)
        assert held.received.request == message
        assert held.received.request is not message
