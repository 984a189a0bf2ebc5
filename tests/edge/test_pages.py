"""What a server shows over HTTP: the page, the readings, the metrics, and nothing else."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator

import pytest
from google.protobuf.json_format import ParseDict

from edge.client import Client, text
from edge.errors import UsageError
from edge.pb import telemetry_pb2 as pb
from edge.server import Ready
from edge.telemetry.http import HttpServer
from edge.telemetry.pages import LiveReading
from tests.support.metrics import wait_until
from tests.support.models import ORACLE

PATHS = ("/", "/telemetry.json", "/metrics")


def asked(port: int | None, method: str, path: str, **options: object) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, **options)  # type: ignore[arg-type]
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


@pytest.mark.parametrize("path", PATHS)
def test_head_is_get_without_the_body(server: Ready, path: str) -> None:
    answer, body = asked(server.metrics_port, "GET", path)
    assert (answer.status, answer.version) == (200, 11)
    assert len(body) == int(answer.headers["Content-Length"]) > 100
    head, nothing = asked(server.metrics_port, "HEAD", path)
    assert (head.status, nothing) == (200, b"")
    assert int(head.headers["Content-Length"]) > 100
    assert head.headers["Content-Type"] == answer.headers["Content-Type"]
    for response in (answer, head):
        assert response.headers["Connection"] == "close"
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", ["/x", "/metrics/", "/..%2f..%2fetc/passwd", "/dashboard.html", "/favicon.ico"])
def test_an_unknown_path(server: Ready, path: str) -> None:
    answer, body = asked(server.metrics_port, "GET", path)
    assert (answer.status, answer.headers["Content-Type"]) == (404, "text/plain; charset=utf-8")
    assert body == b"There are /, /telemetry.json, /metrics.\n"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "zz"])
@pytest.mark.parametrize("path", ["/", "/metrics", "/x"])
def test_another_method(server: Ready, method: str, path: str) -> None:
    answer, body = asked(server.metrics_port, method, path, body=b"x" * 50_000)
    assert (answer.status, answer.headers["Allow"], body) == (405, "GET, HEAD", b"GET or HEAD.\n")


def test_the_page_may_do_nothing_but_run_its_own_script(server: Ready) -> None:
    answer, body = asked(server.metrics_port, "GET", "/")
    page = body.decode()
    rules = dict(rule.split(" ", 1) for rule in answer.headers["Content-Security-Policy"].split("; "))
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert (rules["default-src"], rules["connect-src"], rules["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    # What the policy would forbid anyway: other hosts, handlers and styles in attributes, and markup out of text.
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert not re.findall(r"\son\w+=|\sstyle=|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page)


def test_the_readings_are_the_telemetrys(server: Ready, url: str) -> None:
    with Client(url) as client:
        for _ in range(3):
            client.infer(ORACLE, {"expression": text(["1 + 1"])})
    assert wait_until(lambda: answered(server) >= 3)  # a reading may be a second old
    answer, body = asked(server.metrics_port, "GET", "/telemetry.json")
    assert answer.headers["Content-Type"] == "application/json"
    fields = json.loads(body)
    window = fields.pop("window")
    reading = ParseDict(fields, pb.Reading())
    models = {(model.name, model.version): model for model in reading.models}
    assert models[ORACLE, "1"].stages[0].count == models[ORACLE, "1"].success_count
    assert {(model["name"], model["version"]) for model in window["models"]} == set(models)
    assert {sample.kind for sample in reading.memory} >= {"process_rss", "process_pss", "system_total"}


def answered(server: Ready) -> int:
    _, body = asked(server.metrics_port, "GET", "/telemetry.json")
    return int(next(model for model in json.loads(body)["models"] if model["name"] == ORACLE)["success_count"])


def test_many_viewers_cost_one_reading() -> None:
    taken = []

    def read() -> pb.Reading:
        taken.append(pb.Reading(uptime_seconds=len(taken)))
        return taken[-1]

    live = LiveReading(read)
    threads = [threading.Thread(target=live.json) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1
    assert json.loads(live.json())["window"]["since_start"]


# The port


@pytest.fixture(scope="module")
def echo() -> Iterator[HttpServer]:
    """A server that answers with the method and path, and fails on /wrong."""

    def application(environ, start_response):  # type: ignore[no-untyped-def]
        assert environ["PATH_INFO"] != "/wrong", "a secret"
        body = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}".encode()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    server = HttpServer(application, "127.0.0.1", 0)
    yield server
    server.close()


def raw(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while data := connection.recv(65536):
            answer += data
        return answer


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"\x16\x03\x01 no HTTP\r\n\r\n", b"400"),
        (b"GET / HTTP/9.9\r\n\r\n", b"505"),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"431"),
        (b"GET /a HTTP/1.1\r\nContent-Length: zz\r\n\r\n", b"200"),
        (b"GET /a HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", b"200"),
    ],
    ids=["TLS", "version", "long line", "many headers", "no length", "endless length"],
)
def test_a_strange_request_harms_no_other(echo: HttpServer, request_: bytes, status: bytes) -> None:
    assert status in raw(echo.port, request_).split(b"\r\n")[0]
    assert raw(echo.port, b"GET /b HTTP/1.1\r\nHost: a\r\n\r\n").endswith(b"GET /b")


def test_an_error_tells_nothing(echo: HttpServer, caplog: pytest.LogCaptureFixture) -> None:
    answer, body = asked(echo.port, "GET", "/wrong")
    assert (answer.status, body) == (500, b"internal error; the server's log tells more\n")
    assert "a secret" in caplog.text


def test_a_client_that_goes_is_no_error(echo: HttpServer, capfd: pytest.CaptureFixture[str]) -> None:
    for request in (b"", b"GET", b"GET / HTTP/1.1\r\nContent-Length: 100\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", echo.port)) as connection:
            connection.sendall(request)
    assert raw(echo.port, b"GET /b HTTP/1.1\r\n\r\n").endswith(b"GET /b")
    assert capfd.readouterr() == ("", "")


def test_connections_without_end_make_no_threads_without_end(echo: HttpServer) -> None:
    idle = [socket.create_connection(("127.0.0.1", echo.port), timeout=20) for _ in range(64)]
    try:
        threads = [thread for thread in threading.enumerate() if "process_request" in thread.name]
        assert len(threads) <= 64
        with socket.create_connection(("127.0.0.1", echo.port), timeout=20) as one_more:
            assert one_more.recv(100) == b""
    finally:
        for connection in idle:
            connection.close()
    assert wait_until(lambda: answers(echo.port))  # their threads end soon


def answers(port: int) -> bool:
    try:
        return raw(port, b"GET /b HTTP/1.1\r\n\r\n").endswith(b"GET /b")
    except ConnectionResetError:
        return False


def test_a_port_that_is_taken(echo: HttpServer) -> None:
    with pytest.raises(UsageError, match=f"--metrics-port {echo.port}: got .*in use"):
        HttpServer(lambda environ, start_response: [], "127.0.0.1", echo.port)
    with pytest.raises(UsageError, match="expected a free port"):
        HttpServer(lambda environ, start_response: [], "nowhere.invalid", 0)
