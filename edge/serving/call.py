"""One ModelInfer on its way: the job, and what its response needs."""

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
        request_id: the client's.
        entry: the bundle that it was sent to.
        model: what answers it.
        output_names: the outputs to send, in this order.
        parameters: what the request's parameters ask for.
        windows: the shared memory of those outputs that go there.
        started_ns: when the request arrived, by ``time.perf_counter_ns()``.
        tier_reason: why it was this tier.
        reply: receives the response or the error; None once it has, or once the call was cancelled.
        timer: ends the call where the server limits its time; None where the client's deadline comes first.
        trace_context: the caller's trace, where requests are traced.
    """

    __slots__ = (
        "entry",
        "model",
        "output_names",
        "parameters",
        "reply",
        "request_id",
        "started_ns",
        "tier_reason",
        "timer",
        "trace_context",
        "windows",
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
