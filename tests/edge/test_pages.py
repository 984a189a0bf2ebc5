"""The metrics port: its pages and their headers."""

import base64
import hashlib
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from google.protobuf.json_format import ParseDict

from edge.client import Client, text
from edge.errors import UsageError
from edge.pb import telemetry_pb2 as pb
from edge.telemetry.live import LiveReading, dashboard
from edge.telemetry.pages import Pages
from tests.support.http_requests import ask
from tests.support.http_server import http_server
from tests.support.metrics import wait_until
from tests.support.models import ORACLE


@pytest.fixture
def address(server):
    return f"127.0.0.1:{server.metrics_port}"


@pytest.mark.parametrize("path", ["/", "/telemetry.json", "/metrics"])
def test_head_returns_the_headers_of_get(address, path):
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


def test_wrong_path_is_404_and_wrong_method_is_405(address):
    for path, body, expected in (
        ("/..%2f..%2fetc/passwd", None, (404, None, b"There are /, /telemetry.json, /metrics.\n")),
        ("/metrics/", None, (404, None, b"There are /, /telemetry.json, /metrics.\n")),
        ("/x", b"x" * 50_000, (405, "GET, HEAD", b"GET or HEAD.\n")),
    ):
        response = ask(address, path, body)
        assert (response.status, response.headers.get("allow"), response.body) == expected
        assert response.headers["content-type"] == "text/plain; charset=utf-8"


def test_content_security_policy_allows_only_the_pages_own_script_and_style(address):
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


def test_telemetry_json_is_a_reading_with_its_window(address, server):
    with Client(f"127.0.0.1:{server.grpc_port}") as client:
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


def test_concurrent_viewers_share_one_reading():
    taken = []

    def read():
        taken.append(pb.Reading(uptime_seconds=len(taken)))
        return taken[-1]

    live = LiveReading(read)
    with ThreadPoolExecutor(20) as threads:
        assert len(set(threads.map(lambda _: live.json(), range(20)))) == 1
    assert len(taken) == 1
    assert json.loads(live.json())["window"]["since_start"]


class SlowPage:
    """A page that takes as long as the test lets it, and counts how often it is asked for and rendered."""

    def __init__(self):
        self.go = threading.Event()
        self.go.set()
        self.asked = self.count = 0

    def __call__(self, accept):
        self.asked += 1

        def render():
            self.count += 1
            assert self.go.wait(10)
            assert accept != "failure", "a secret"
            return {"Content-Type": "text/plain"}, b"the page"

        return accept, render


@pytest.fixture(scope="module")
def page():
    return SlowPage()


@pytest.fixture(scope="module")
def url(page):
    with http_server(Pages({"/metrics": page}, root=dashboard())) as server:
        yield f"127.0.0.1:{server.port}"


def test_internal_error_is_logged_and_shows_nothing(url, caplog):
    response = ask(url, "/metrics", headers={"Accept": "failure"})
    assert (response.status, response.json) == (500, {"error": "internal error; see the server's log"})
    assert "a secret" in caplog.text


def test_scrapes_that_wait_share_a_page_and_block_nobody(url, page):
    page.go.clear()
    page.asked = page.count = 0
    with ThreadPoolExecutor(20) as threads:
        scrapes = [threads.submit(ask, url, "/metrics") for _ in range(20)]
        assert wait_until(lambda: page.asked == 20)
        assert ask(url, "/").status == 200
        page.go.set()
        assert {scrape.result().body for scrape in scrapes} == {b"the page"}
    assert page.count == 1


@pytest.mark.parametrize(("host", "problem"), [("127.0.0.1", ".*in use"), ("nowhere.invalid", ".+")])
def test_port_that_cannot_be_taken(url, host, problem):
    port = int(url.partition(":")[2])
    expected = f"^--metrics-port {port}: got {problem}.*, expected a free port on {host}"
    with (
        pytest.raises(UsageError, match=expected),
        http_server(Pages(SlowPage(), LiveReading(pb.Reading)), host=host, port=port),
    ):
        pass
