"""Attacks on the HTTP port."""

import json
import time
from contextlib import ExitStack, closing, suppress

from tests.attacks.measure import attack
from tests.attacks.wire import connect, http_request, stay
from tests.support.http_requests import INFER, good
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
def chunks_of_one_byte(target):
    """5 MB of chunks of one byte each, without a token."""
    with closing(connect(target.http_port)) as connection:
        head = http_request(f"POST {INFER}", ["Transfer-Encoding: chunked"])
        connection.sendall(head + b"1\r\na\r\n" * (5_000_000 // 6))
        stay(connection, 1.0)


@attack(**_HTTP)
def unknown_parameters_over_http(target):
    """4 MB of names of parameters that resemble known ones."""
    _post(target, INFER, {**good(), "parameters": {f"timeou{n:06d}": 1 for n in range(230_000)}})


@attack(**_HTTP)
def many_choices_of_a_long_prompt(target):
    """2 MB: a prompt of a million tokens, 64 times."""
    _post(target, _COMPLETIONS, {"model": NAME, "prompt": [1] * 1_000_000, "n": 64})


@attack(**_HTTP)
def many_choices_with_many_stops(target):
    """4 MB: a million texts that end a text, 256 times."""
    _post(target, _COMPLETIONS, {"model": NAME, "prompt": "a", "n": 256, "stop": ["a"] * 1_000_000})


@attack(**_HTTP)
def nested_json(target):
    """4 MB of opening brackets, and 4 MB of digits."""
    for body in (b"[" * 4_000_000, b'{"id":' + b"9" * 4_000_000 + b"}"):
        with suppress(OSError), closing(connect(target.http_port)) as connection:
            connection.sendall(_request(target, INFER, body))
            stay(connection, 0.3)


@attack(**_HTTP)
def aborted_bodies(target):
    """20 connections that send 50 MB of a body of 60 MB each, and hang up."""
    _abandoned(target, 20, _request(target, INFER, bytes(50_000_000), 60_000_000), 0)


@attack(**_HTTP)
def streams_without_a_reader(target):
    """60 streams of completions that nobody reads, and whose clients leave soon."""
    body = json.dumps({"model": NAME, "prompt": "abc", "max_tokens": 90, "stream": True}).encode()
    _abandoned(target, 60, _request(target, _COMPLETIONS, body), 0.3)
