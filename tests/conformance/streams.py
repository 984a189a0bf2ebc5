"""Cases about streams."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
from google.protobuf.message import Message

from edge.pb import inference_pb2 as pb
from tests.conformance.case import Case
from tests.conformance.peer import Peer, flat, mixed, parameter, request, slow, told
from tests.support.open_stream import Sender

FINAL = "triton_final_response"


def _one(response: pb.ModelStreamInferResponse) -> str:
    inner = response.infer_response
    return f"{inner.id or '-'}{' failed' if response.error_message else ''}"


def _numbered(identity: str, message: pb.ModelInferRequest) -> pb.ModelInferRequest:
    message.id = identity
    return message


def _ask(peer: Peer, requests: Iterable[Message | bytes], timeout: float = 30) -> str:
    """The ids of the answers in their order, which of them are errors, and the status of the stream."""
    answers: list[str] = []

    def read() -> None:
        answers.extend(_one(response) for response in peer.stream(requests, timeout))

    status = told(read)
    return f"{status}: {' '.join(answers) or 'no answer'}"


def _order(peer: Peer) -> str:
    return _ask(peer, [_numbered("slow", slow(100)), *(_numbered(str(number), flat()) for number in range(3))])


def _same_model(peer: Peer) -> str:
    return _ask(peer, [_numbered(str(number), slow(10)) for number in range(5)])


def _error(peer: Peer) -> str:
    return _ask(peer, [_numbered("1", flat()), _numbered("2", flat(model="zz")), _numbered("3", flat())])


def _kept_open(peer: Peer, bad: pb.ModelInferRequest) -> str:
    """Whether a stream that was told of an error answers what is sent after that."""
    sender = Sender()
    responses = peer.stream(sender)
    sender.queue.put(_numbered("bad", bad))
    first = told(lambda: next(responses), _one)
    sender.queue.put(_numbered("good", flat()))
    second = told(lambda: next(responses), _one)
    sender.queue.put(None)
    return f"{first}, {second}, {told(lambda: list(responses))}"


def _final(peer: Peer, message: pb.ModelInferRequest) -> str:
    (response,) = peer.stream([message])
    parameters = response.infer_response.parameters
    return str(parameters[FINAL].bool_param) if FINAL in parameters else "absent"


def _model_of_error(peer: Peer) -> str:
    (response,) = peer.stream([_numbered("2", flat(model="zz"))])
    return f"model={response.infer_response.model_name!r} outputs={len(response.infer_response.outputs)}"


def _cancelled(peer: Peer) -> str:
    """Whether what waits in a stream that is cancelled is computed, and the next stream answered."""
    before = peer.executions("slow")
    stream = peer.stream([slow(400) for _ in range(6)])
    time.sleep(0.03)
    stream.cancel()
    answer = _ask(peer, [_numbered("next", slow(1))])
    return f"{answer}, runs of the cancelled at most 1: {peer.executions('slow') - before <= 2}"


def _unparseable(peer: Peer) -> str:
    first = _ask(peer, [_numbered("1", flat()), b"\xff\xff\xff", _numbered("2", flat())])
    return f"{first}, then {_ask(peer, [flat()])}"


CASES = [
    Case("a stream of nothing", lambda peer: _ask(peer, []), "OK: no answer"),
    Case("a stream of one", lambda peer: _ask(peer, [_numbered("1", mixed())]), "OK: 1"),
    Case(
        "a stream of 100",
        lambda peer: str(
            _ask(peer, [_numbered(str(n), flat()) for n in range(100)]) == "OK: " + " ".join(map(str, range(100)))
        ),
        "True",
    ),
    Case("a stream: order among requests to one model", _same_model, "OK: 0 1 2 3 4"),
    Case("a stream: order among requests to models of different speed", _order, "OK: slow 0 1 2"),
    Case("a stream: an unknown model in the middle", _error, "OK: 1 2 failed 3"),
    Case(
        "a stream: what the answer to a bad request holds",
        _model_of_error,
        "model='' outputs=0",
        "model='zz' outputs=0",
        "So that a client of several models knows whose error it is.",
    ),
    Case(
        "a stream: open after an unknown model",
        lambda peer: _kept_open(peer, flat(model="zz")),
        "OK: bad failed, OK: good, OK",
    ),
    Case("a stream: open after a wrong shape", lambda peer: _kept_open(peer, mixed(9)), "OK: bad failed, OK: good, OK"),
    Case(
        "a stream: open after a model that fails",
        lambda peer: _kept_open(peer, request("failing", index=np.array([5], np.int64))),
        "OK: bad failed, OK: good, OK",
    ),
    Case("a stream: triton_final_response", lambda peer: _final(peer, flat()), "True"),
    Case(
        "a stream: triton_final_response, asked for",
        lambda peer: _final(peer, parameter("triton_enable_empty_final_response", bool_param=True)),
        "True",
    ),
    Case(
        "a stream: triton_final_response of an error",
        lambda peer: _final(peer, flat(model="zz")),
        "absent",
        "True",
        "It is the last answer to its request, and who counts those must not miss it.",
    ),
    Case("a stream: an empty message", lambda peer: _ask(peer, [pb.ModelInferRequest()]), "OK: - failed"),
    Case(
        "a stream: a message that is none",
        _unparseable,
        "OK: 1, then OK: -",
        "INTERNAL: 1, then OK: -",
        "Triton ends the stream as if all were well, and the client never learns that its requests are lost.",
    ),
    Case(
        "a stream: a deadline",
        lambda peer: f"{_ask(peer, [slow(400)], 0.03)}, then {_ask(peer, [slow(1)])}",
        "DEADLINE_EXCEEDED: no answer, then OK: -",
    ),
    Case("a stream: cancelled", _cancelled, "OK: next, runs of the cancelled at most 1: True"),
]
