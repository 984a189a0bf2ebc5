"""The live page in a real browser: under load, with hostile names, without sensors, and after the server ends."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from edge.client import Client, text
from edge.client.retries import ONCE
from edge.errors import ServerError
from edge.launch import running_server
from edge.pb import telemetry_pb2 as pb
from edge.telemetry.live import LiveReading, dashboard
from edge.telemetry.pages import Pages
from tests.support.http_server import http_server
from tests.support.metrics import wait_until
from tests.support.models import ORACLE, ORACLE_BUNDLE
from tests.support.secured_servers import tokens_file
from tests.support.server_models import WIDTH, write_tiered_bundle

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
#: Chromium reads commands from descriptor 3 and writes to 4.
_START = "import os, sys; os.dup2({read}, 3); os.dup2({write}, 4); os.execv(sys.argv[1], sys.argv[1:])"
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
_SECONDS = 60


class Browser:
    """One tab; ``complaints`` are errors on the console, with exceptions and violations of the content policy."""

    def __init__(self, commands, answers):
        self._commands, self._answers = commands, answers
        self._number, self._session = 0, ""
        self.complaints = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._collect(answer)

    def open(self, url, width=1280, height=800, *, dark=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression, seconds=20):
        limit = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < limit, f"{expression}: {self.evaluate('document.body.innerText')}"
            time.sleep(0.1)

    def _read(self):
        message = bytearray()
        while not message.endswith(b"\0"):
            byte = self._answers.read(1)
            assert byte, "the browser has ended"
            message += byte
        return json.loads(message[:-1])

    def _collect(self, event):
        parameters = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))
        if event["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(parameters["entry"]["text"])


@contextmanager
def browser():
    to_read, commands = os.pipe()
    answers, to_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        start = [sys.executable, "-c", _START.format(read=to_read, write=to_write), CHROMIUM]
        process = subprocess.Popen(
            [*start, *_FLAGS, "--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        try:
            with os.fdopen(commands, "wb") as writer, os.fdopen(answers, "rb") as reader:
                yield Browser(writer, reader)
        finally:
            process.terminate()
            process.wait(_SECONDS)


@contextmanager
def load(url):
    """Send requests to the oracle and to the model with tiers during the block."""
    done = threading.Event()

    def work(tier):
        with Client(url, retries=ONCE) as client:
            while not done.wait(0.02):
                with suppress(ServerError):
                    client.infer(ORACLE, {"expression": text(["1 + 2"])})
                    client.infer("tiered", {"x": np.zeros((1, WIDTH), np.float32)}, tier=tier)

    with ThreadPoolExecutor(8) as pool:
        for _ in range(4):
            pool.submit(work, "")
            pool.submit(work, "full")
        try:
            yield
        finally:
            done.set()


pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]

STATUS = "document.querySelector('#status').className"
HOSTILE = "<img src=x onerror=\"document.title='taken over'\">"


@pytest.fixture
def tab():
    with browser() as opened:
        yield opened
        assert opened.complaints == []


def cells(tab, title):
    rows = f"[...document.querySelectorAll('[aria-label=\"{title}\"] tbody tr')]"
    return tab.evaluate(f"{rows}.map(row => [...row.cells].map(cell => cell.textContent))")


def charts(tab):
    labels = tab.evaluate(
        "[...document.querySelectorAll('figure svg[role=img]')].map(one => one.getAttribute('aria-label'))"
    )
    return dict(label.split(": ", 1) for label in labels)


def test_page_follows_the_load_and_reports_a_missing_server(tab, tmp_path):
    bundles = [write_tiered_bundle(tmp_path / "tiered").path, ORACLE_BUNDLE]
    with running_server(bundles, arguments=["--policy=load", "--max-queue-size=16"]) as ready:
        page = f"http://127.0.0.1:{ready.metrics_port}/"
        tab.open(page)
        tab.wait(f"{STATUS} === 'live'")
        with load(f"127.0.0.1:{ready.grpc_port}"):
            tab.wait("document.title.includes(' ms')", 30)
            tab.wait("document.querySelectorAll('[aria-label=Tiers] tbody tr').length > 0", 30)
            assert [row[:3] for row in cells(tab, "Models")] == [
                ["calculator-oracle", "1", "READY"],
                ["tiered", "1", "READY"],
            ]
            assert wait_until(lambda: all(float(row[3].replace(",", "")) > 0 for row in cells(tab, "Models")))
            shares = [float(row[2]) for row in cells(tab, "Tiers")]
            assert sum(shares) == pytest.approx(100, abs=1)
            labels = charts(tab)
            assert {"Throughput", "Latency of requests", "Tiers", "Queue", "Memory"} <= set(labels)
            assert "p99 " in labels["Latency of requests"]
            tab.wait("document.querySelectorAll('figure polyline').length >= 5")
    tab.wait(f"{STATUS} === 'gone'", 30)
    assert "The server is gone since" in tab.evaluate("document.querySelector('#status').textContent")
    with running_server([ORACLE_BUNDLE], arguments=[f"--metrics-port={ready.metrics_port}"]):
        tab.wait(f"{STATUS} === 'live'", 30)
        tab.wait("document.querySelectorAll('[aria-label=Models] tbody tr').length === 1")
        tab.complaints[:] = [found for found in tab.complaints if "net::ERR_" not in found]
        tab.open("about:blank")


def test_page_requests_a_token(tab, tmp_path):
    tokens = tokens_file(tmp_path / "tokens", metrics=["metrics"], infer=["infer"])
    with running_server([ORACLE_BUNDLE], arguments=[f"--tokens={tmp_path / 'tokens'}"]) as ready:
        tab.open(f"http://127.0.0.1:{ready.metrics_port}/")
        for token, message in (("", "authorization: got "), ("fewheads_wrong", "got "), (tokens["infer"], "got token")):
            give(tab, token)
            tab.wait(f"document.querySelector('#status').textContent.includes({message!r})")
            assert tab.evaluate(STATUS) == "gone"
            assert not tab.evaluate("document.querySelector('#guard').hidden")
        give(tab, tokens["metrics"])
        tab.wait(f"{STATUS} === 'live' && document.querySelector('#guard').hidden")
        assert cells(tab, "Models")[0][0] == "calculator-oracle"
        tab.complaints[:] = [found for found in tab.complaints if "status of 40" not in found]
        tab.open("about:blank")


def give(tab, token):
    tab.evaluate(
        f"document.querySelector('#token').value = {token!r}, document.querySelector('#guard').requestSubmit()"
    )


@contextmanager
def shown(read, tab, **options):
    with http_server(Pages({"/telemetry.json": LiveReading(read).page}, root=dashboard())) as server:
        tab.open(f"http://127.0.0.1:{server.port}/", **options)
        tab.wait(f"{STATUS} === 'live'")
        yield
        tab.open("about:blank")


def test_names_are_escaped(tab):
    def read():
        count = round(time.monotonic() * 100)
        model = pb.ModelReading(name=HOSTILE, version=HOSTILE, state=HOSTILE, success_count=count)
        model.tiers.add(tier=HOSTILE, reason=HOSTILE, count=count)
        model.drops.add(reason=HOSTILE, place=HOSTILE, count=count)
        model.metrics.add(name=HOSTILE, labels={HOSTILE: HOSTILE}, value=count)
        reading = pb.Reading(uptime_seconds=time.monotonic(), models=[model], problems=[HOSTILE])
        reading.sensors.add(kind="temperature", name=HOSTILE, value=1, unit=HOSTILE, source=HOSTILE)
        reading.memory.add(kind=HOSTILE, size_bytes=1, source=HOSTILE)
        return reading

    with shown(read, tab):
        tab.wait("document.querySelector('[aria-label=\"Not answered\"] td') !== null")
        assert cells(tab, "Models")[0][:3] == [HOSTILE] * 3
        assert cells(tab, "Metrics")[0][:3] == [HOSTILE, HOSTILE, f'{HOSTILE}="{HOSTILE}"']
        assert tab.evaluate("document.querySelector('#problems li').textContent") == HOSTILE
        assert tab.evaluate("document.querySelectorAll('img').length") == 0
        assert "taken over" not in tab.evaluate("document.title")


def test_board_with_sensors(tab):
    def read():
        reading = pb.Reading(uptime_seconds=time.monotonic())
        for kind, name, value, unit in (
            ("temperature", "cpu-thermal", 51.5, "celsius"),
            ("power", "VDD_IN", 7.25, "watts"),
            ("utilization", "gpu", 0.42, "ratio"),
        ):
            reading.sensors.add(kind=kind, name=name, value=value, unit=unit, source="/sys")
        reading.board.CopyFrom(pb.Board(model="NVIDIA Jetson", power_mode="25W"))
        reading.idle_power_watts = 5.25
        model = reading.models.add(name="m", version="1")
        model.energy.add(tier="full", joules=2 * time.monotonic(), requests=round(1000 * time.monotonic()))
        return reading

    with shown(read, tab):
        tab.wait("document.querySelectorAll('figure').length === 8")
        facts = {row[0]: row[1] for row in cells(tab, "Machine")}
        assert (facts["board power mode"], facts["power idle"]) == ("25W", "5.25 W")
        ((name, tier, _, _, millijoules, by_token),) = cells(tab, "Energy above idle")
        assert (name, tier, by_token) == ("m", "full", "–")
        assert float(millijoules) == pytest.approx(2, rel=0.01)
        labels = charts(tab)
        assert labels["Temperature"] == "cpu-thermal 51.5 °C"
        assert labels["Power"] == "VDD_IN 7.25 W"
        assert labels["Utilization"] == "gpu 42 %"
        assert tab.evaluate("document.querySelector('#note').hidden")


@pytest.mark.parametrize("width", [320, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_board_without_sensors_on_any_screen(tab, width, dark):
    with shown(lambda: pb.Reading(uptime_seconds=time.monotonic()), tab, width=width, dark=dark):
        tab.wait("!document.querySelector('#note').hidden")
        note = tab.evaluate("document.querySelector('#note').textContent")
        assert note == "This machine tells no temperature and no power."
        assert not {"Temperature", "Power", "Utilization"} & set(charts(tab))
        assert tab.evaluate("document.documentElement.scrollWidth") <= width  # only tables scroll sideways
        paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, paper[4:-1].split(","))) < 200) is dark
