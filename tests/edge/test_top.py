"""``fewheads top`` on real servers, as a user sees it."""

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import contextmanager, suppress

import pytest
from rich.console import Console

from edge.cli.view import duration, view
from edge.client import Client, text
from edge.launch import running_server
from edge.pb import telemetry_pb2 as pb
from edge.telemetry.window import between
from tests.support.commands import SECONDS, ran, shown
from tests.support.models import ORACLE, ORACLE_BUNDLE


@contextmanager
def top(url, **streams):
    command = [sys.executable, "-m", "edge", "top", "--url", url, "--interval", "0.1"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **streams}
    with subprocess.Popen(command, **streams) as process:
        try:
            yield process
        finally:
            process.kill()


def interrupted(process):
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, error
    assert "Traceback" not in error
    return error


def ask(url, times):
    with Client(url) as client:
        for _ in range(times):
            client.infer(ORACLE, {"expression": text(["1 + 1"])})


def cells(line):
    return [cell.strip() for cell in line.split("│")[1:-1]]


def rendered(reading):
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(view("url", reading, between(None, reading), 120))
    return console.export_text()


def test_once_shows_tables_or_json(url):
    ask(url, 3)
    tables = shown("top", "--url", url, "--once")
    assert "since the start" in tables.splitlines()[0]
    assert all(word in tables for word in ("p50 ms", "p95 ms", "p99 ms", "rows/run", "queue", "process rss"))
    rows = [cells(line) for line in tables.splitlines() if f"{ORACLE}:1" in line]
    (row,) = [row for row in rows if row[1:2] == ["READY"]]
    assert 0 < float(row[4]) <= float(row[5]) <= float(row[6])
    (line,) = shown("top", "--url", url, "--once", "--json").splitlines()
    window = json.loads(line)["window"]
    (found,) = [model for model in window["models"] if model["name"] == ORACLE]
    assert window["since_start"]
    assert found["answers"] == found["stages"]["request"]["count"] >= 3


def test_rising_metrics_have_labels():
    now = pb.Reading(uptime_seconds=2, models=[pb.ModelReading(name="m", version="1", success_count=1)])
    now.models[0].metrics.add(name="fewheads_input_tokens_total", labels={"tier": "full"}, value=6, unit="tokens")
    now.models[0].metrics.add(name="fewheads_nonfinite_answers_total", value=0)
    (row,) = [line for line in rendered(now).splitlines() if "fewheads_" in line]
    assert cells(row) == ["m:1", 'fewheads_input_tokens_total{tier="full"}', "6", "3"]


def test_energy_and_board_of_a_jetson():
    now = pb.Reading(uptime_seconds=2, models=[pb.ModelReading(name="m", version="1")], idle_power_watts=5.25)
    now.models[0].energy.add(tier="full", joules=8, requests=4, tokens=400)
    now.models[0].energy.add(tier="half", joules=1, requests=2)
    now.board.CopyFrom(pb.Board(model="NVIDIA Jetson Orin Nano", l4t="36.4.3", power_mode="MAXN_SUPER"))
    now.sensors.add(kind="frequency_limit", name="gpu-max", value=1.02e9, unit="hertz")
    now.sensors.add(kind="fan", name="pwm_tach", value=1843, unit="rpm")
    lines = [line.strip() for line in rendered(now).splitlines()]
    assert [cells(line) for line in lines if "m:1" in line][1:] == [
        ["m:1", "full", "4", "4", "2000", "20"],
        ["m:1", "half", "0.5", "2", "500", ""],
    ]
    board = "NVIDIA Jetson Orin Nano, L4T 36.4.3, power mode MAXN_SUPER"
    rows = {"board": board, "clock limits": "gpu-max 1020 MHz", "fan": "pwm_tach 1843 rpm", "idle power": "5.25 W"}
    for label, value in rows.items():
        assert [line.removeprefix(label).strip() for line in lines if line.startswith(label)] == [value]


def test_pipe_gets_plain_tables(url):
    short = ran("top", "--url", url, "--interval", "0.01")
    assert (short.exit_code, "0.1<=x<=3600" in short.stderr) == (2, True)
    with top(url) as process:
        assert process.stdout is not None
        titles = 0
        while titles < 3:
            line = process.stdout.readline()
            assert "\x1b" not in line
            titles += line.startswith(f"{url}  up ")
        interrupted(process)


def _plain(screen):
    """Return the text of a terminal; each view starts on a new line."""
    text = screen.decode(errors="replace")  # may end within a character
    return re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", text.replace("\x1b[H", "\n"))


@pytest.mark.parametrize("columns", [40, 140])
def test_terminal_gets_one_live_view(url, columns):
    ask(url, 1)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 200, columns, 0, 0))
    # A library in this process may have set the size of another terminal.
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment["TERM"] = "xterm-256color"
    with top(url, stdout=theirs, env=environment) as process:
        os.close(theirs)
        seen = b""
        while [word for word in ("p50 ms", "p99 ms", "queue", "process rss") if word not in _plain(seen)]:
            ask(url, 1)  # latencies are those of the last seconds
            seen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # the command has closed the terminal
            while select.select([ours], [], [], SECONDS)[0]:
                seen += os.read(ours, 65536)
        assert process.wait(SECONDS) == 0
    os.close(ours)
    screen = seen.decode(errors="replace")  # may end within a character
    assert screen.rindex("\x1b[?1049l") > screen.rindex("\x1b[?1049h")  # the earlier screen is back
    plain = _plain(seen)
    assert ("rows/run" in plain) is (columns == 140)
    assert max(len(line.rstrip("\r")) for line in plain.split("\n")) <= columns


@pytest.mark.slow
def test_silent_server_is_awaited():
    # As a board that has lost its power: the connection does not end.
    with (
        running_server([ORACLE_BUNDLE]) as ready,
        top(f"127.0.0.1:{ready.grpc_port}", stdout=subprocess.DEVNULL) as process,
    ):
        assert process.stderr is not None
        time.sleep(3)
        os.kill(ready.process_id, signal.SIGSTOP)
        try:
            assert "waiting for the server: telemetry at" in process.stderr.readline()
        finally:
            os.kill(ready.process_id, signal.SIGCONT)
        assert (process.stderr.readline(), interrupted(process)) == ("the server is back\n", "")


def test_duration_has_two_units():
    found = [duration(seconds) for seconds in (0, 59.9, 60, 3599, 3600, 90061, 1e7)]
    assert found == ["0 s", "59 s", "1 min 0 s", "59 min 59 s", "1 h 0 min", "1 d 1 h", "115 d 17 h"]
