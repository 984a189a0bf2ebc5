"""The metrics port: its pages, its headers, and its limits on connections."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import ssl
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from google.protobuf.json_format import ParseDict

from edge.client import Client, text
from edge.errors import UsageError
from edge.pb import telemetry_pb2 as pb
from edge.security.credentials import ServerCertificates
from edge.server import Ready
from edge.telemetry import http
from edge.telemetry.http import HttpServer
from edge.telemetry.pages import LiveReading, Pages
from tests.support.http_requests import ask
from tests.support.metrics import wait_until
from tests.support.models import ORACLE
from tests.support.secured_servers import Authority


@pytest.fixture
def address(server: Ready) -> str:
    return f"127.0.0.1:{server.metrics_port}"


@pytest.mark.parametrize("path", ["/", "/telemetry.json", "/metrics"])
def test_head_returns_the_headers_of_get(address: str, path: str) -> None:
    response, head = ask(address, path), ask(address, path, method="HEAD")
    assert (response.status, head.status, head.body) == (200, 200, b"")
    assert len(response.body) == int(response.headers["content-length"]) > 100
    for headers in (response.headers, head.headers):
        del headers["content-length"], headers["date"]
    assert head.headers == response.headers
    assert response.headers.pop("content-type")
    assert bool(response.headers.pop("content-security-policy", None)) == (path == "/")
    assert response.headers == {
        "connection": "close",
        "cache-control": "no-store",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "server": "fewheads",
        "x-content-type-options": "nosniff",
    }


def test_wrong_path_is_404_and_wrong_method_is_405(address: str) -> None:
    for path, body, expected in (
        ("/..%2f..%2fetc/passwd", None, (404, None, b"There are /, /telemetry.json, /metrics.\n")),
        ("/metrics/", None, (404, None, b"There are /, /telemetry.json, /metrics.\n")),
        ("/x", b"x" * 50_000, (405, "GET, HEAD", b"GET or HEAD.\n")),
    ):
        response = ask(address, path, body)
        assert (response.status, response.headers.get("allow"), response.body) == expected
        assert response.headers["content-type"] == "text/plain; charset=utf-8"


def test_content_security_policy_allows_only_the_pages_own_script_and_style(address: str) -> None:
    response = ask(address, "/")
    page = response.body.decode()
    rules = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert (rules["default-src"], rules["connect-src"], rules["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    # What the policy would forbid anyway: other hosts, handlers and styles in attributes, and markup out of text.
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)|\son\w+=|\sstyle=|\w+HTML|document\.write|eval\(", page)


def test_telemetry_json_is_a_reading_with_its_window(address: str, url: str) -> None:
    with Client(url) as client:
        client.infer(ORACLE, {"expression": text(["1 + 1"])})
    response = ask(address, "/telemetry.json")
    assert response.headers["content-type"] == "application/json"
    fields = response.json
    window = fields.pop("window")
    reading = ParseDict(fields, pb.Reading())
    models = {(model.name, model.version): model for model in reading.models}
    oracle = models[ORACLE, "1"]
    assert (oracle.stages[0].count, oracle.state, oracle.device) == (oracle.success_count, "READY", "CPU")
    assert {(model["name"], model["version"]) for model in window["models"]} == set(models)
    assert {sample.kind for sample in reading.memory} >= {"process_rss", "process_pss", "system_total"}


def test_concurrent_viewers_share_one_reading() -> None:
    taken = []

    def read() -> pb.Reading:
        taken.append(pb.Reading(uptime_seconds=len(taken)))
        return taken[-1]

    live = LiveReading(read)
    with ThreadPoolExecutor(20) as threads:
        assert len(set(threads.map(lambda _: live.json(), range(20)))) == 1
    assert len(taken) == 1
    assert json.loads(live.json())["window"]["since_start"]


def metrics(accept: str) -> tuple[dict[str, str], bytes]:
    assert accept != "failure", "a secret"
    return {"Content-Type": "text/plain"}, b"the page"


def serve(certificates: ServerCertificates | None = None, host: str = "127.0.0.1", port: int = 0) -> HttpServer:
    return HttpServer(Pages(metrics, LiveReading(pb.Reading)).answer, host, port, certificates)


@pytest.fixture(scope="module", autouse=True)
def _short_idle_time() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http._Connection, "timeout", 0.5)
        yield


@pytest.fixture(scope="module")
def port(_short_idle_time: None) -> Iterator[int]:
    server = serve()
    yield server.port
    server.close()


GOOD = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"


def raw(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while data := connection.recv(65536):
            answer += data
        return answer


def is_answered(port: int) -> bool:
    try:
        return raw(port, GOOD).endswith(b"the page")
    except ConnectionError:
        return False


def test_malformed_request_harms_no_other(port: int) -> None:
    for request, status in (
        (b"\x16\x03\x01 no HTTP\r\n\r\n", b" 400 "),
        (b"GET /metrics HTTP/1.1\r\nContent-Length: zz\r\n\r\n", b" 200 "),
        (b"GET /metrics HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", b" 200 "),
    ):
        assert status in raw(port, request).split(b"\r\n")[0]
        assert is_answered(port)


def test_internal_error_is_logged_and_shows_nothing(port: int, caplog: pytest.LogCaptureFixture) -> None:
    response = ask(f"127.0.0.1:{port}", "/metrics", headers={"Accept": "failure"})
    assert (response.status, response.body) == (500, b"internal error; see the server's log\n")
    assert "a secret" in caplog.text


@pytest.mark.parametrize("request_", [b"", GOOD[:-2], GOOD[:-2] + b"Content-Length: 9\r\n\r\nx"])
def test_connection_without_a_whole_request_is_closed(
    port: int, request_: bytes, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    begun = time.monotonic()
    assert raw(port, request_) == b""
    assert 0.4 < time.monotonic() - begun < 10
    with socket.create_connection(("127.0.0.1", port)) as connection:  # and leaves
        connection.sendall(request_)
    assert is_answered(port)
    assert (capfd.readouterr(), caplog.records) == (("", ""), [])


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_idle_connections_are_closed_and_further_ones_at_once(tmp_path: Path, scheme: str) -> None:
    authority = Authority(tmp_path)
    context = ssl.create_default_context(cafile=str(authority.file))
    server = serve(ServerCertificates(*authority.issue(), client_ca=None) if scheme == "https" else None)

    def is_served() -> bool:
        with (
            suppress(OSError),
            urllib.request.urlopen(f"{scheme}://127.0.0.1:{server.port}/metrics", timeout=20, context=context) as page,
        ):
            return page.read() == b"the page"
        return False

    try:
        idle = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(64)]
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as one_more:
            assert one_more.recv(100) == b""
        assert all(connection.send(b"G") for connection in idle)
        for connection in idle:
            assert connection.recv(100) == b""
            connection.close()
        assert wait_until(is_served)
    finally:
        server.close()


async def test_it_answers_while_the_event_loop_of_the_server_is_blocked(port: int) -> None:
    assert is_answered(port)  # blocks the running loop


@pytest.mark.parametrize(("host", "problem"), [("127.0.0.1", ".*in use"), ("nowhere.invalid", ".+")])
def test_port_that_cannot_be_taken(port: int, host: str, problem: str) -> None:
    with pytest.raises(UsageError, match=f"^--metrics-port {port}: got {problem}, expected a free port"):
        serve(host=host, port=port)
