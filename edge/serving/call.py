"""One ModelInfer in progress: the job and the data for its response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from edge.instruments.snapshot import End
from edge.pb import inference_pb2 as pb
from edge.programs.program import TOKENS
from edge.scheduling.answers import Answer
from edge.scheduling.job import Job
from edge.serving.forms import Form
from edge.serving.shared_memory import Window

#: Receives the response, or the error in its place, on the event loop.
Reply = Callable[[pb.ModelInferResponse | Exception], None]
#: Receives a call that has a partial answer for its reader to take, on the event loop, before the reply.
Told = Callable[["Call"], None]


class Call(Job):
    """A job of the scheduler that answers a client."""

    __slots__ = (
        "end",
        "form",
        "reply",
        "request_id",
        "sent",
        "started_ns",
        "tier_reason",
        "timer",
        "told",
        "trace_context",
        "windows",
    )

    request_id: str
    form: Form
    windows: Mapping[str, Window]  # the shared memory of the outputs that go there, by name
    started_ns: int  # arrival of the request, by time.perf_counter_ns()
    end: End | None  # once a request to an iterative program is answered
    sent: dict[str, list[int]]  # of texts in a stream: the bytes, or tokens, of each row that earlier answers had
    tier_reason: str  # why the scheduler chose the tier
    reply: Reply | None  # None after it was given, or after a cancellation
    told: Told | None  # None on an RPC with one response, and after the reply
    timer: asyncio.TimerHandle | None  # for the server's time limit; None where the client's deadline comes first
    trace_context: Any  # the caller's trace, if requests are traced

    def unsent(self, answer: Answer) -> Answer:
        """Return an answer of a stream without what earlier ones had of texts; its reader takes every answer once."""
        growing, per_token = self.executor.program.growing, self.executor.program.per_token
        if not growing:
            return answer
        outputs = dict(answer.outputs)
        for name in per_token.keys() & outputs.keys():
            lengths = answer.facts[TOKENS].tolist()
            sent = self.sent.setdefault(name, [0] * len(lengths))
            new = [max(length - before, 0) for length, before in zip(lengths, sent, strict=True)]
            tokens = np.full((len(new), max(new)), per_token[name], outputs[name].dtype)
            for row, count in enumerate(new):
                tokens[row, :count] = outputs[name][row, sent[row] : sent[row] + count]
                sent[row] += count
            outputs[name] = tokens
        for name in growing:
            texts = outputs[name] = outputs[name].copy()
            sent = self.sent.setdefault(name, [0] * len(texts))
            for row, text in enumerate(texts[:, 0]):
                texts[row, 0] = text[sent[row] :]
                sent[row] = max(sent[row], len(text))  # the last answer may overtake those that wait
        return answer._replace(outputs=outputs)
