"""One ModelInfer in progress: the job and the data for its response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from edge.pb import inference_pb2 as pb
from edge.scheduling.job import Job
from edge.serving.forms import Form
from edge.serving.shared_memory import Window

#: Receives the response, or the error in its place, on the event loop.
Reply = Callable[[pb.ModelInferResponse | Exception], None]


class Call(Job):
    """A job of the scheduler that answers a client."""

    __slots__ = ("form", "reply", "request_id", "started_ns", "tier_reason", "timer", "trace_context", "windows")

    request_id: str
    form: Form
    windows: Mapping[str, Window]  # the shared memory of the outputs that go there, by name
    started_ns: int  # arrival of the request, by time.perf_counter_ns()
    tier_reason: str  # why the scheduler chose the tier
    reply: Reply | None  # None after it was given, or after a cancellation
    timer: asyncio.TimerHandle | None  # for the server's time limit; None where the client's deadline comes first
    trace_context: Any  # the caller's trace, if requests are traced
