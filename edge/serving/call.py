"""One ModelInfer in progress: the job and the data for its response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from edge.instruments.snapshot import End, LoopEnd, TextEnd
from edge.pb import inference_pb2 as pb
from edge.programs.generate import FIRST_TOKEN_NS, LAST_TOKEN_NS, PROMPT_TOKENS
from edge.programs.loop import RESIDUAL
from edge.programs.program import TIER, TOKENS
from edge.protocol import BY_BUDGET, BY_DEADLINE, BY_LENGTH, BY_STOP, BY_TOLERANCE, LOOPS, STOPPED
from edge.scheduling.job import Answer, Job
from edge.serving.forms import Form
from edge.serving.shared_memory import Window

#: Why a row of a loop or a text stopped. A response names the first of its rows' reasons.
_REASONS: Final = (BY_DEADLINE, BY_BUDGET, BY_LENGTH, BY_TOLERANCE, BY_STOP)

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

    def answering_tiers(self, answer: Answer) -> str:
        """Return the tier that answered; if several answered rows, their names with commas, the leanest first."""
        rows = answer.facts.get(TIER)
        if rows is None:
            return self.executor.tier
        names = set(rows.tolist())
        return ",".join([name for name in reversed(self.form.model.tiers) if name in names])

    def end_of(self, answer: Answer) -> End:
        """Return how the rows of a loop or a text ended."""
        facts, tier = answer.facts, self.executor.tier
        stopped = facts[STOPPED].tolist()
        reason = next(reason for reason in _REASONS if reason in stopped)
        if RESIDUAL in facts:
            return LoopEnd(tier, int(facts[LOOPS].max()), float(facts[RESIDUAL].max()), reason)
        tokens, first_ns, last_ns = facts[TOKENS], facts[FIRST_TOKEN_NS], facts[LAST_TOKEN_NS]
        token_ns = int((last_ns - first_ns).sum() / max(int(tokens.sum()) - len(tokens), 1))
        first_token_ns = int(first_ns.mean()) - self.started_ns
        return TextEnd(tier, int(facts[PROMPT_TOKENS].sum()), int(tokens.sum()), first_token_ns, token_ns, reason)
