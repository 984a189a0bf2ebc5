"""Notifications as systemd receives them, and the unit file as systemd checks it."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from edge.cli.serve import serve
from edge.health.supervisor import Notifier
from edge.settings import Settings
from tests.support.metrics import wait_until
from tests.support.models import write_oracle_bundle
from tests.support.server_models import busy, write_busy_bundle
from tests.support.server_processes import served

UNIT = Path(__file__).parents[2] / "deploy" / "fewheads.service"


class Listener:
    def __init__(self, address: str) -> None:
        self.address = address
        self.messages: list[str] = []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0", 1) if address.startswith("@") else address)
        self.socket.setblocking(False)

    def read(self) -> list[str]:
        with suppress(BlockingIOError):
            while True:
                self.messages.append(self.socket.recv(65536).decode())
        return self.messages


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener(f"@fewheads-{secrets.token_hex(8)}")
    yield listener
    listener.socket.close()


def test_message_is_one_datagram_of_lines(listener: Listener, tmp_path: Path) -> None:
    at_path = Listener(str(tmp_path / "notify"))
    for each in (listener, at_path):
        Notifier({"NOTIFY_SOCKET": each.address}).notify(READY=1, STATUS="two\nlines, é")
        assert each.read() == ["READY=1\nSTATUS=two lines, é"]
    at_path.socket.close()


def test_nothing_is_sent_without_a_supervisor_and_a_missing_socket_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for variables, warnings in (({}, 0), ({"NOTIFY_SOCKET": str(tmp_path / "none")}, 1)):
        notifier = Notifier(variables)
        for _ in range(3):
            notifier.notify(READY=1)
        assert len(caplog.records) == warnings


def test_full_socket_does_not_block(listener: Listener) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": listener.address})
    for _ in range(2000):
        notifier.notify(STATUS="x")
    assert 0 < len(listener.read()) < 2000


def test_watchdog_interval_comes_from_the_environment() -> None:
    for variables, seconds in (
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "²"}, None),
        ({}, None),
        ({"WATCHDOG_USEC": "1000000", "NOTIFY_SOCKET": ""}, None),
    ):
        assert Notifier({"NOTIFY_SOCKET": "@x", **variables}).watchdog_seconds == seconds


def test_server_notifies_from_start_to_stop(listener: Listener, tmp_path: Path) -> None:
    repository = write_oracle_bundle(tmp_path / "repository" / "oracle", "oracle", 1).path.parent
    write_busy_bundle(repository)
    given = {"NOTIFY_SOCKET": listener.address, "WATCHDOG_USEC": "600000"}
    with served(repository, "--watchdog-seconds=0.2", "--stuck-exit-seconds=inf", "--drain-seconds=0", **given) as it:
        assert wait_until(lambda: "READY=1" in listener.read())
        assert wait_until(lambda: "STATUS=2 of 2 models ready" in listener.read())
        assert wait_until(lambda: listener.read().count("WATCHDOG=1") > 2)
        it.stub.ModelInfer(busy(2000))
        assert wait_until(lambda: listener.read()[-1] == "WATCHDOG=1")
        os.kill(it.ready.process_id, signal.SIGTERM)
        assert it.end()[0] == 0
    messages = listener.read()
    stuck = next(index for index, text in enumerate(messages) if "takes longer than its limit" in text)
    assert messages[stuck + 1] == "STATUS=2 of 2 models ready"  # without a ping in between, so that systemd acts
    assert messages.index("READY=1") < stuck < messages.index("STOPPING=1")


def unit() -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE))


def seconds(time: str) -> int:
    number, of = re.fullmatch(r"(\d+)(s|min)", time).groups()  # type: ignore[union-attr]
    return int(number) * (60 if of == "min" else 1)


def test_unit_agrees_with_the_server() -> None:
    command = unit()["ExecStart"].split()
    given = {word for word in command if word.startswith("--")}
    assert given <= {name for parameter in serve.params for name in parameter.opts}
    assert seconds(unit()["TimeoutStopSec"]) > float(command[command.index("--drain-seconds") + 1]) + 3
    assert seconds(unit()["WatchdogSec"]) > Settings.watchdog_seconds + Settings.stuck_exit_seconds


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit_and_rates_it_hardened(tmp_path: Path) -> None:
    installed = tmp_path / UNIT.name
    installed.write_text(UNIT.read_text().replace("/opt/fewheads/bin/fewheads", shutil.which("true") or ""))
    verified = subprocess.run(["systemd-analyze", "verify", installed], capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=yes", "--no-pager", "--threshold=25", installed]
    judged = subprocess.run(command, capture_output=True, text=True)
    assert judged.returncode == 0, judged.stdout[-2000:]
