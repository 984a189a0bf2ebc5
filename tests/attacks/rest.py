"""Attacks on the HTTP port."""

import json
import time
from contextlib import ExitStack, closing, suppress

from tests.attacks.measure import attack
from tests.attacks.target import WIDE
from tests.attacks.wire import connect, http_request
from tests.support.http_requests import INFER
from tests.support.letters_model import NAME

#: gRPC's transport has no part in these.
_HTTP = {"transports": ("nghttp2",)}
_COMPLETIONS = "/v1/completions"


def _request(target, path, body, size_bytes=0):
    fields = [f"Authorization: Bearer {target.home.tokens['infer']}", f"Content-Length: {size_bytes or len(body)}"]
    return http_request(f"POST {path}", fields, body)


def _post(target, path, document):
    with closing(connect(target.http_port)) as connection:
        connection.settimeout(30)
        connection.sendall(_request(target, path, json.dumps(document, separators=(",", ":")).encode()))
        connection.recv(65536)


def _abandoned(target, count, request, rest_seconds):
    """Send a request on each of many connections, none of which reads."""
    with ExitStack() as connections:
        for _ in range(count):
            with suppress(OSError):
                one = connections.enter_context(closing(connect(target.http_port)))
                one.settimeout(0.5)
                one.sendall(request)
        time.sleep(rest_seconds)


@attack(**_HTTP)
def many_choices_of_a_long_prompt(target):
    """2 MB: a prompt of a million tokens, 64 times."""
    _post(target, _COMPLETIONS, {"model": NAME, "prompt": [1] * 1_000_000, "n": 64})


@attack(**_HTTP)
def long_answers(target):
    """Three outputs of a million numbers as JSON."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [0.1]}
    _post(target, f"/v2/models/{WIDE}/infer", {"inputs": [tensor]})


@attack(**_HTTP)
def aborted_bodies(target):
    """20 connections that send 50 MB of a body of 60 MB each, and hang up."""
    _abandoned(target, 20, _request(target, INFER, bytes(50_000_000), 60_000_000), 0)


@attack(**_HTTP)
def streams_without_a_reader(target):
    """60 streams of completions that nobody reads, and whose clients leave soon."""
    body = json.dumps({"model": NAME, "prompt": "abc", "max_tokens": 90, "stream": True}).encode()
    _abandoned(target, 60, _request(target, _COMPLETIONS, body), 0.3)
