"""One ModelInfer in progress: the job and the data for its response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edge.pb import inference_pb2 as pb
from edge.repository.entry import Entry
from edge.repository.model import Model
from edge.scheduling.job import Job
from edge.serving.parameters import Parameters
from edge.serving.shared_memory import Window

#: Receives the response, or the error in its place, on the event loop.
Reply = Callable[[pb.ModelInferResponse | Exception], None]


class Call(Job):
    """A job of the scheduler that answers a client.

    Attributes:
        output_names: the outputs to send, in this order.
        windows: the shared memory of the outputs that go there, by name.
        started_ns: arrival of the request, by ``time.perf_counter_ns()``.
        tier_reason: why the scheduler chose the tier.
        reply: receives the response or the error; None after that, or after a cancellation.
        timer: ends the call at the server's time limit; None where the client's deadline comes first.
        trace_context: the caller's trace, if requests are traced.
    """

    __slots__ = (
        *("entry", "model", "output_names", "parameters", "reply", "request_id", "started_ns", "tier_reason"),
        *("timer", "trace_context", "windows"),
    )

    request_id: str
    entry: Entry
    model: Model
    output_names: Sequence[str]
    parameters: Parameters
    windows: Mapping[str, Window]
    started_ns: int
    tier_reason: str
    reply: Reply | None
    timer: asyncio.TimerHandle | None
    trace_context: Any
