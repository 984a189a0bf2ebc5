"""Cases about streams."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
from google.protobuf.message import Message

from edge.pb import inference_pb2 as pb
from edge.protocol import FINAL_RESPONSE
from tests.conformance.case import Case
from tests.conformance.peer import Peer, flat, mixed, outcome, parameter, request, slow
from tests.support.open_stream import Sender


def _one(response: pb.ModelStreamInferResponse) -> str:
    inner = response.infer_response
    return f"{inner.id or '-'}{' failed' if response.error_message else ''}"


def _numbered(identity: str, message: pb.ModelInferRequest) -> pb.ModelInferRequest:
    message.id = identity
    return message


def _send(peer: Peer, requests: Iterable[Message | bytes], timeout: float = 30) -> str:
    """The status of a stream, and the ids of its responses in order, with the errors among them."""
    answers: list[str] = []

    status = outcome(lambda: answers.extend(_one(response) for response in peer.stream(requests, timeout)))
    return f"{status}: {' '.join(answers) or 'no answer'}"


def _order(peer: Peer) -> str:
    return _send(peer, [_numbered("slow", slow(100)), *(_numbered(str(number), flat()) for number in range(3))])


def _same_model(peer: Peer) -> str:
    return _send(peer, [_numbered(str(number), slow(10)) for number in range(5)])


def _error(peer: Peer) -> str:
    return _send(peer, [_numbered("1", flat()), _numbered("2", flat(model="zz")), _numbered("3", flat())])


def _kept_open(peer: Peer, bad: pb.ModelInferRequest) -> str:
    """An error and the next response of a stream that stays open."""
    sender = Sender()
    responses = peer.stream(sender)
    sender.queue.put(_numbered("bad", bad))
    first = outcome(lambda: next(responses), _one)
    sender.queue.put(_numbered("good", flat()))
    second = outcome(lambda: next(responses), _one)
    sender.queue.put(None)
    return f"{first}, {second}, {outcome(lambda: list(responses))}"


def _final(peer: Peer, message: pb.ModelInferRequest) -> str:
    (response,) = peer.stream([message])
    parameters = response.infer_response.parameters
    return str(parameters[FINAL_RESPONSE].bool_param) if FINAL_RESPONSE in parameters else "absent"


def _model_of_error(peer: Peer) -> str:
    (response,) = peer.stream([_numbered("2", flat(model="zz"))])
    return f"model={response.infer_response.model_name!r} outputs={len(response.infer_response.outputs)}"


def _cancelled(peer: Peer) -> str:
    """A cancelled stream: the number of runs, and the next stream."""
    before = peer.executions("slow")
    stream = peer.stream([slow(400) for _ in range(6)])
    time.sleep(0.03)
    stream.cancel()
    answer = _send(peer, [_numbered("next", slow(1))])
    return f"{answer}, runs of the cancelled at most 1: {peer.executions('slow') - before <= 2}"


def _unparseable(peer: Peer) -> str:
    first = _send(peer, [_numbered("1", flat()), b"\xff\xff\xff", _numbered("2", flat())])
    return f"{first}, then {_send(peer, [flat()])}"


CASES = [
    Case("a stream of nothing", lambda peer: _send(peer, []), "OK: no answer"),
    Case("a stream of one", lambda peer: _send(peer, [_numbered("1", mixed())]), "OK: 1"),
    Case(
        "a stream of 100",
        lambda peer: str(
            _send(peer, [_numbered(str(n), flat()) for n in range(100)]) == "OK: " + " ".join(map(str, range(100)))
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
        "So that a client of several models knows the model of an error.",
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
        "a stream: triton_final_response, requested",
        lambda peer: _final(peer, parameter("triton_enable_empty_final_response", bool_param=True)),
        "True",
    ),
    Case(
        "a stream: triton_final_response of an error",
        lambda peer: _final(peer, flat(model="zz")),
        "absent",
        "True",
        "It is the last response to its request, and clients count those.",
    ),
    Case("a stream: an empty message", lambda peer: _send(peer, [pb.ModelInferRequest()]), "OK: - failed"),
    Case(
        "a stream: a message that is none",
        _unparseable,
        "OK: 1, then OK: -",
        "INTERNAL: 1, then OK: -",
        "Triton ends the stream with OK, and the client does not learn that its requests are lost.",
    ),
    Case(
        "a stream: a deadline",
        lambda peer: f"{_send(peer, [slow(400)], 0.03)}, then {_send(peer, [slow(1)])}",
        "DEADLINE_EXCEEDED: no answer, then OK: -",
    ),
    Case("a stream: cancelled", _cancelled, "OK: next, runs of the cancelled at most 1: True"),
]
