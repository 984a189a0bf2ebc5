"""Cases about streams."""

import time

import numpy as np

from edge.pb import inference_pb2 as pb
from edge.protocol import FINAL_RESPONSE
from tests.conformance.peer import Case, flat, mixed, outcome, slow
from tests.support.sample_requests import Sender, raw_request


def _one(response):
    return f"{response.infer_response.id or '-'}{' failed' if response.error_message else ''}"


def _numbered(identity, message):
    message.id = identity
    return message


def _send(peer, requests, timeout=30):
    """The status of a stream, and the ids of its responses in order, with the errors among them."""
    answers = []
    status = outcome(lambda: answers.extend(_one(response) for response in peer.stream(requests, timeout)))
    return f"{status}: {' '.join(answers) or 'no answer'}"


def _stream(name, requests, expected=""):
    return Case(f"a stream: {name}", lambda peer: _send(peer, requests), expected)


def _kept_open(what, bad):
    """An error and the next response of a stream that stays open."""

    def ask(peer):
        sender = Sender()
        responses = peer.stream(sender)
        sender.queue.put(_numbered("bad", bad))
        first = outcome(lambda: next(responses), _one)
        sender.queue.put(_numbered("good", flat()))
        second = outcome(lambda: next(responses), _one)
        sender.queue.put(None)
        return f"{first}, {second}, {outcome(lambda: list(responses))}"

    return Case(f"a stream: open after {what}", ask, "OK: bad failed, OK: good, OK")


def _final(message):
    def ask(peer):
        (response,) = peer.stream([message])
        parameters = response.infer_response.parameters
        return str(parameters[FINAL_RESPONSE].bool_param) if FINAL_RESPONSE in parameters else "absent"

    return ask


def _model_of_error(peer):
    (response,) = peer.stream([_numbered("2", flat(model="zz"))])
    return f"model={response.infer_response.model_name!r} outputs={len(response.infer_response.outputs)}"


def _cancelled(peer):
    """A cancelled stream: the number of runs, and the next stream."""
    outcome(lambda: peer.send("ModelInfer", slow(600)))  # after a long run, a worker computes, and not the event loop
    before = peer.executions("slow")
    stream = peer.stream([slow(400) for _ in range(6)])
    time.sleep(0.03)
    stream.cancel()
    answer = _send(peer, [_numbered("next", slow(1))])
    return f"{answer}, runs of the cancelled at most 1: {peer.executions('slow') - before <= 2}"


def _unparseable(peer):
    first = _send(peer, [_numbered("1", flat()), b"\xff\xff\xff", _numbered("2", flat())])
    return f"{first}, then {_send(peer, [flat()])}"


_HUNDRED = [str(number) for number in range(100)]
_UNKNOWN = flat(model="zz")
CASES = [
    _stream("nothing", [], "OK: no answer"),
    _stream("100 requests", [_numbered(number, flat()) for number in _HUNDRED], f"OK: {' '.join(_HUNDRED)}"),
    _stream("models of different speed", [_numbered("slow", slow(100)), _numbered("fast", flat())], "OK: slow fast"),
    Case("a stream: what the answer to a bad request holds", _model_of_error),
    _kept_open("an unknown model", _UNKNOWN),
    _kept_open("a wrong shape", mixed(9)),
    _kept_open("a model that fails", raw_request("failing", index=np.array([5], np.int64))),
    Case("a stream: triton_final_response", _final(flat()), "True"),
    Case("a stream: triton_final_response of an error", _final(_UNKNOWN)),
    _stream("an empty message", [pb.ModelInferRequest()], "OK: - failed"),
    Case("a stream: a message that is none", _unparseable),
    Case(
        "a stream: a deadline",
        lambda peer: f"{_send(peer, [slow(400)], 0.03)}, then {_send(peer, [slow(1)])}",
        "DEADLINE_EXCEEDED: no answer, then OK: -",
    ),
    Case("a stream: cancelled", _cancelled, "OK: next, runs of the cancelled at most 1: True"),
]
