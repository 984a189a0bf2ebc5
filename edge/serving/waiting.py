"""A request that waits until its models are loaded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from edge.datatypes import Array
from edge.errors import Overloaded, RequestError
from edge.pb import inference_pb2 as pb
from edge.repository.entry import Entry
from edge.repository.model import Model
from edge.repository.on_demand import OnDemand
from edge.serving.call import Call, Received
from edge.serving.forms import take
from edge.serving.parameters import Parameters, parse
from edge.serving.request import UncheckedRequest, request_of

#: Where a request is that a client or a deadline ends, as :attr:`edge.scheduling.job.Job.stage`.
LOADING: Final = "loading"


class Waiting:
    """A request whose model ``entry`` is not loaded; ``call`` is None until it is."""

    def __init__(self, received: Received, entry: Entry) -> None:
        """Take a request; raise an InvalidRequest if its parameters are wrong."""
        self.received, self.arrival, self.entry = received, received.arrival, entry
        request = received.request
        unchecked = request if isinstance(request, UncheckedRequest) else request_of(request)
        self.parameters: Parameters = parse(unchecked.parameters)
        self.size_bytes = _held_bytes(received)
        self.call: Call | None = None
        self.over = False  # whether it waits no more
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    def seconds_left(self, default_timeout: float | None) -> float | None:
        """Return the time until its deadline or the server's limit; None without one."""
        limit = self.parameters.timeout_seconds or default_timeout
        deadline = self.received.deadline
        left = [] if deadline is None else [deadline - time.monotonic()]
        return min([*left, limit] if limit is not None else left, default=None)

    async def wait(self, models: OnDemand, begin: Callable[[Received], Call | None]) -> None:
        """Call ``begin`` while the models that it needs are loaded and in use; raise the error of those that cannot be.

        What is wrong with its head is left to ``begin``.
        """
        with ExitStack() as held:

            def hold(model: Model) -> None:
                take(model)
                held.callback(model.use.give_back)

            request, model = self.received.request, None
            # Again, because another version of the model may answer once the head is loaded.
            while (found := await models.ready(request.model_name, request.model_version))[1] is not model:
                entry, model = found
                hold(model)
                if self.parameters.head:
                    name, _, version = self.parameters.head.partition(":")
                    try:
                        hold((await models.ready(name, version, base=entry))[1])
                    except Overloaded:
                        raise
                    except RequestError:
                        pass  # the checks of the request find and describe it
            loading_ns = time.perf_counter_ns() - self.arrival.started_ns
            self.call = begin(self.received._replace(arrival=self.arrival._replace(loading_ns=loading_ns)))


def _held_bytes(received: Received) -> int:
    request, raw = received.request, len(received.key) + sum(map(len, received.contents))
    if isinstance(request, UncheckedRequest):
        return raw + sum(_size(tensor.contents) for tensor in request.inputs)
    return raw or request.ByteSize()


def _size(contents: pb.InferTensorContents | Array | bytes | None) -> int:
    if contents is None or isinstance(contents, bytes):
        return len(contents or b"")
    if isinstance(contents, pb.InferTensorContents):
        return contents.ByteSize()
    texts: list[Any] = contents.ravel().tolist() if contents.dtype.kind == "O" else []
    return contents.nbytes + sum(map(len, texts))
