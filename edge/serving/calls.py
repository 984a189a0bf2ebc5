"""One inference from its message to its response, awaited; and which models are in use meanwhile.

Runs on the event loop, and nowhere else: between the look-up of a model and the entry in the list of its users nothing
else happens, so no model can be closed in between.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

from edge.errors import RequestError
from edge.instruments.logs import ABOUT, About
from edge.pb import inference_pb2 as pb
from edge.repository.model import Model
from edge.scheduling.job import expired
from edge.security.access import CALLER
from edge.security.rate import RateLimit
from edge.serving.express import Express
from edge.serving.service import InferenceService


class Calls:
    """Answers single requests, for unary calls and streams alike.

    Args:
        service: the inference service.
        limit: how often each caller may ask; None lets all ask as they like.
        express: answers what needs not wait; None lets all go the usual way.
    """

    def __init__(
        self, service: InferenceService, limit: RateLimit | None = None, express: Express | None = None
    ) -> None:
        self._service = service
        self._express = express
        self._limit = limit
        self._futures: WeakKeyDictionary[Model, set[Future[Any]]] = WeakKeyDictionary()

    def infer_at_once(self, request: pb.ModelInferRequest, deadline: float | None) -> pb.ModelInferResponse | None:
        """Answer a request that needs not wait and has nothing to be refused for; None, untouched, for any other.

        Args:
            request: the client's message.
            deadline: as :meth:`infer` takes it.
        """
        if self._limit or not self._express:
            return None
        ABOUT.set(About(request.model_name, request.id))
        try:
            return self._express.answer(request, deadline)
        except RequestError:
            return None

    async def infer(self, request: pb.ModelInferRequest, deadline: float | None) -> pb.ModelInferResponse:
        """Answer one request. Cancelling this drops it wherever it waits.

        Args:
            request: the client's message, which is not to be read again: parts of it are taken out.
            deadline: ``time.monotonic()`` seconds at which the client stops waiting; None if it waits for ever.

        Raises:
            RequestError: it cannot be answered. It is counted already.
        """
        ABOUT.set(About(request.model_name, request.id))
        if self._limit:
            self._limit.take(CALLER.get())
        response = self._express.answer(request, deadline) if self._express else None
        if response:
            return response
        call = self._service.start(request, deadline)
        futures = self._futures.setdefault(call.model, set())
        futures.add(call.future)
        # Not when this coroutine ends: what is cancelled while it computes uses the model still.
        call.future.add_done_callback(futures.discard)
        try:
            if call.future.done():  # so quick that no other thread was asked
                answer = call.future.result()
                if self._express:
                    self._express.learn(call)
            elif call.wait_seconds is None:  # the client's own deadline cancels this coroutine
                answer = await asyncio.wrap_future(call.future)
            else:
                answer = await asyncio.wait_for(asyncio.wrap_future(call.future), call.wait_seconds)
            return self._service.finish(call, answer)
        except asyncio.CancelledError:
            self._service.failed(call, "Cancelled")
            raise
        except asyncio.TimeoutError:
            self._service.failed(call, "DeadlineExceeded")
            raise expired(time.perf_counter_ns() - call.started_ns) from None
        except Exception as error:
            self._service.failed(call, type(error).__name__)
            # The future holds the error, the error its traceback, and that this frame, which must not hold the future
            # in turn: until Python's collector came by, such a circle would keep the request's tensors.
            del call, futures
            raise

    async def idle(self, model: Model) -> None:
        """Wait until no request uses a model. Those that begin meanwhile are not waited for."""
        loop = asyncio.get_running_loop()
        for future in list(self._futures.get(model, ())):
            done = asyncio.Event()
            future.add_done_callback(lambda _, done=done: loop.call_soon_threadsafe(done.set))  # type: ignore[misc]
            await done.wait()
