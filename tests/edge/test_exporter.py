"""The exporter of the board's metrics: the names of a server, its doors, its end, and mistakes in its options."""

import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from edge.instruments.energy import UnknownWork, energy_meter
from edge.instruments.memory import MemorySampler
from edge.instruments.sensors import Sensors
from edge.telemetry.board import BOARD_METRICS, BoardCollector
from tests.support.boards import orin_nano
from tests.support.commands import SECONDS, fewheads, mistake, refusal
from tests.support.http_requests import ask
from tests.support.metrics import page_of, wait_until
from tests.support.secured_servers import tokens_file


@contextmanager
def exporting(*arguments):
    """Run an exporter while the block runs, and yield its address; it must end in good order."""
    command = [sys.executable, "-m", "edge", "exporter", "--metrics-port=0", "--json", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        ready = json.loads(process.stdout.readline())
        assert ready["process_id"] == process.pid
        yield f"127.0.0.1:{ready['metrics_port']}"
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=SECONDS)
    assert (process.returncode, log) == (0, "")


def names(page):
    return {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}


def test_page_has_the_boards_metrics_of_a_server(server):
    with exporting() as address:
        load = "fewheads_utilization_ratio"  # known from the second sample on
        assert wait_until(lambda: load in ask(address, "/metrics").body.decode())
        assert wait_until(lambda: load in page_of(server))
        page = ask(address, "/metrics")
        assert page.headers["content-type"].startswith("text/plain; version=")
        found = names(page.body.decode())
        assert found == names(page_of(server)) & (BOARD_METRICS | {"fewheads_build_info"})
        assert 'fewheads_memory_bytes{kind="system_total"' in page.body.decode()
        assert ask(address, "/").body == b"There are /metrics.\n"
        assert "Host: got 'evil.example'" in ask(address, "/metrics", headers={"Host": "evil.example"}).body.decode()


def test_every_metric_of_a_board_is_there(tmp_path):
    root = orin_nano(tmp_path, 6)
    energy = energy_meter(UnknownWork, root)
    energy.sample(time.monotonic())
    board = BoardCollector(MemorySampler(root), Sensors(root), energy)
    found = {sample.name for family in board.collect() for sample in family.samples}
    # Idle power needs a server that knows when nothing runs; the board's facts are those of this machine.
    assert BOARD_METRICS - found == {"fewheads_idle_power_watts", "fewheads_board_info"}


def test_tokens_and_a_taken_port(tmp_path):
    tokens = tokens_file(tmp_path / "tokens", scraper=["metrics"], camera=["infer"])
    with exporting(f"--tokens={tmp_path / 'tokens'}") as address:
        statuses = [
            ask(address, "/metrics", headers={"Authorization": f"Bearer {token}"}).status
            for token in (tokens["scraper"], tokens["camera"], "wrong")
        ]
        assert statuses == [200, 403, 401]
        port = address.rpartition(":")[2]
        line = refusal(fewheads("exporter", f"--metrics-port={port}"), 2)
        assert line.startswith(f"fewheads: --metrics-port {port}: got ")


def test_mistakes_in_its_options(tmp_path, monkeypatch):
    file = tmp_path / "exporter.toml"
    file.write_text("grpc-port = 1\n")  # a server's
    assert "grpc-port: got an unknown name, expected an option of `fewheads exporter`" in mistake(
        "exporter", "--config", file
    )
    for arguments, message in (
        (["--metrics-port=65536"], "--metrics-port: got 65536, expected 0 to 65535. "),
        (["--tls-key=k"], "--tls-certificate and --tls-key: got --tls-key alone"),
        (["--tls-client-ca=k"], "--tls-client-ca: got no --tls-certificate"),
        ([f"--tokens={tmp_path / 'none'}"], "--tokens"),
        (["--log-level=zz"], "--log-level: got 'zz', expected one of debug"),
    ):
        assert mistake("exporter", *arguments).startswith(message)
    monkeypatch.setenv("FEWHEADS_EXPORTER_METRICS_PORT", "-1")
    assert mistake("exporter").endswith("--metrics-port comes from FEWHEADS_EXPORTER_METRICS_PORT.")


def test_host_that_is_not_here():
    with socket.socket() as probe, pytest.raises(OSError, match="assign"):
        probe.bind(("192.0.2.1", 0))
    line = refusal(fewheads("exporter", "--host=192.0.2.1", "--metrics-port=0"), 2)
    assert "--metrics-port 0: got [Errno 99]" in line
