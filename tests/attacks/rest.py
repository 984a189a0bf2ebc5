"""Attacks on the HTTP port."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, closing, suppress

from tests.attacks.measure import attack
from tests.attacks.target import Target
from tests.attacks.wire import connect, http_request, stay
from tests.support.http_requests import INFER, good
from tests.support.letters_model import NAME

#: gRPC's transport has no part in these.
_HTTP = {"transports": ("nghttp2",)}


def post(target: Target, path: str, document: object, *headers: str, token: str = "infer") -> bytes:
    """Send a document, and return the beginning of the answer."""
    body = json.dumps(document, separators=(",", ":")).encode()
    fields = [f"Authorization: Bearer {target.home.tokens[token]}", f"Content-Length: {len(body)}", *headers]
    with closing(connect(target.http_port)) as connection:
        connection.settimeout(30)
        connection.sendall(http_request(f"POST {path}", fields, body))
        return connection.recv(65536)


@attack(**_HTTP)
def chunks_of_one_byte(target: Target) -> None:
    """5 MB of chunks of one byte each, without a token."""
    with closing(connect(target.http_port)) as connection:
        head = http_request(f"POST {INFER}", ["Transfer-Encoding: chunked"])
        connection.sendall(head + b"1\r\na\r\n" * (5_000_000 // 6))
        stay(connection, 1.0)


@attack(**_HTTP)
def unknown_parameters_over_http(target: Target) -> None:
    """4 MB of names of parameters that resemble known ones."""
    post(target, INFER, {**good(), "parameters": {f"timeou{n:06d}": 1 for n in range(230_000)}})


@attack(**_HTTP)
def many_choices_of_a_long_prompt(target: Target) -> None:
    """2 MB: a prompt of a million tokens, 64 times."""
    post(target, "/v1/completions", {"model": NAME, "prompt": [1] * 1_000_000, "n": 64})


@attack(**_HTTP)
def many_choices_with_many_stops(target: Target) -> None:
    """4 MB: a million texts that end a text, 256 times."""
    post(target, "/v1/completions", {"model": NAME, "prompt": "a", "n": 256, "stop": ["a"] * 1_000_000})


@attack(**_HTTP)
def nested_json(target: Target) -> None:
    """4 MB of opening brackets, and 4 MB of digits."""
    for body in (b"[" * 4_000_000, b'{"id":' + b"9" * 4_000_000 + b"}"):
        with suppress(OSError), closing(connect(target.http_port)) as connection:
            fields = [f"Authorization: Bearer {target.home.tokens['infer']}", f"Content-Length: {len(body)}"]
            connection.sendall(http_request(f"POST {INFER}", fields, body))
            stay(connection, 0.3)


@attack(**_HTTP)
def aborted_bodies(target: Target) -> None:
    """20 connections that send 50 MB of a body of 60 MB each, and hang up."""
    fields = [f"Authorization: Bearer {target.home.tokens['infer']}", "Content-Length: 60000000"]
    part = bytes(50_000_000)
    with ExitStack() as connections:
        for _ in range(20):
            with suppress(OSError):
                one = connections.enter_context(closing(connect(target.http_port)))
                one.settimeout(0.5)
                one.sendall(http_request(f"POST {INFER}", fields) + part)


@attack(**_HTTP)
def streams_without_a_reader(target: Target) -> None:
    """60 streams of completions that nobody reads, and whose clients leave soon."""
    body = json.dumps({"model": NAME, "prompt": "abc", "max_tokens": 90, "stream": True}).encode()
    fields = [f"Authorization: Bearer {target.home.tokens['infer']}", f"Content-Length: {len(body)}"]
    with ExitStack() as connections:
        for _ in range(60):
            with suppress(OSError):
                one = connections.enter_context(closing(connect(target.http_port)))
                one.sendall(http_request("POST /v1/completions", fields, body))
        time.sleep(0.3)
