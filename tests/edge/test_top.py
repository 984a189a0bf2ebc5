"""``fewheads top`` on real servers, as a user sees it."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any

import pytest
from rich.console import Console

from edge.cli.view import duration, view
from edge.client import Client, text
from edge.launch import running_server
from edge.pb import telemetry_pb2 as pb
from edge.telemetry.window import between
from tests.support.commands import SECONDS, answer, fewheads, refusal
from tests.support.models import ORACLE, ORACLE_BUNDLE


@contextmanager
def top(*arguments: str, **streams: Any) -> Iterator[subprocess.Popen[str]]:
    """Let it run while the block runs, unless it has ended by then."""
    command = [sys.executable, "-m", "edge", "top", *arguments]
    with subprocess.Popen(
        command, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **streams}
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def interrupted(process: subprocess.Popen[str]) -> str:
    """Press Ctrl-C and return what it still had to say on stderr."""
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, error
    assert "Traceback" not in error
    return error


def ask(url: str, times: int) -> None:
    with Client(url) as client:
        for _ in range(times):
            client.infer(ORACLE, {"expression": text(["1 + 1"])})


def lines(stream: IO[str] | None) -> Iterator[Any]:
    assert stream is not None
    return (json.loads(line) for line in stream)


def test_once(url: str) -> None:
    ask(url, 3)
    shown = answer(fewheads("top", "--url", url, "--once"))
    assert "since the start" in shown.splitlines()[0]
    assert all(word in shown for word in ("p50 ms", "p95 ms", "p99 ms", "rows/run", "queue", "process rss"))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if f"{ORACLE}:1" in line]
    (cells,) = [row for row in rows if row[1:2] == ["READY"]]
    assert 0 < float(cells[4]) <= float(cells[5]) <= float(cells[6])


def test_metrics_that_grew_are_shown_with_their_labels() -> None:
    now = pb.Reading(uptime_seconds=2, models=[pb.ModelReading(name="m", version="1", success_count=1)])
    now.models[0].metrics.add(name="fewheads_input_tokens_total", labels={"tier": "full"}, value=6, unit="tokens")
    now.models[0].metrics.add(name="fewheads_nonfinite_answers_total", value=0)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(view("url", now, between(None, now), 120))
    shown = console.export_text()
    (row,) = [line for line in shown.splitlines() if "fewheads_" in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "m:1",
        'fewheads_input_tokens_total{tier="full"}',
        "6",
        "3",
    ]


def test_the_energy_and_the_board_of_a_jetson() -> None:
    now = pb.Reading(uptime_seconds=2, models=[pb.ModelReading(name="m", version="1")], idle_power_watts=5.25)
    now.models[0].energy.add(tier="full", joules=8, requests=4, tokens=400)
    now.models[0].energy.add(tier="half", joules=1, requests=2)
    now.board.CopyFrom(pb.Board(model="NVIDIA Jetson Orin Nano", l4t="36.4.3", power_mode="MAXN_SUPER"))
    now.sensors.add(kind="frequency_limit", name="gpu-max", value=1.02e9, unit="hertz")
    now.sensors.add(kind="fan", name="pwm_tach", value=1843, unit="rpm")
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(view("url", now, between(None, now), 120))
    shown = console.export_text()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "m:1" in line]
    assert rows[1:] == [["m:1", "full", "4", "4", "2000", "20"], ["m:1", "half", "0.5", "2", "500", ""]]
    lines = [line.strip() for line in shown.splitlines()]
    for label, told in (
        ("board", "NVIDIA Jetson Orin Nano, L4T 36.4.3, power mode MAXN_SUPER"),
        ("clock limits", "gpu-max 1020 MHz"),
        ("fan", "pwm_tach 1843 rpm"),
        ("idle power", "5.25 W"),
    ):
        assert [line.removeprefix(label).strip() for line in lines if line.startswith(label)] == [told]


def test_once_as_json(url: str) -> None:
    ask(url, 3)
    (line,) = answer(fewheads("top", "--url", url, "--once", "--json")).splitlines()
    reading = json.loads(line)
    (found,) = [model for model in reading["window"]["models"] if model["name"] == ORACLE]
    assert reading["window"]["since_start"]
    assert found["answers"] == found["stages"]["request"]["count"] >= 3
    assert int(next(m for m in reading["models"] if m["name"] == ORACLE)["success_count"]) >= found["answers"]


def test_a_stream_of_json_follows_the_load(url: str) -> None:
    with top("--url", url, "--interval", "0.1", "--json") as process:
        readings = lines(process.stdout)
        first = next(readings)
        ask(url, 20)
        for reading in readings:
            before, now = (
                int(next(m for m in r["models"] if m["name"] == ORACLE)["success_count"]) for r in (first, reading)
            )
            if now - before == 20:
                break
        window = reading["window"]
        assert not window["since_start"]
        assert window["seconds"] == pytest.approx(reading["uptime_seconds"] - first["uptime_seconds"])
        assert window["answers_per_second"] * window["seconds"] == pytest.approx(20)
        (found,) = [model for model in window["models"] if model["name"] == ORACLE]
        assert found["stages"]["request"]["count"] == 20
        assert interrupted(process) == ""


def test_into_a_pipe_go_plain_tables(url: str) -> None:
    with top("--url", url, "--interval", "0.1") as process:
        assert process.stdout is not None
        titles = 0
        for line in process.stdout:
            assert "\x1b" not in line
            titles += line.startswith(f"{url}  up ")
            if titles == 3:
                break
        interrupted(process)


@pytest.mark.parametrize("columns", [40, 140])
def test_in_a_terminal(url: str, columns: int) -> None:
    ask(url, 1)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 200, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("COLUMNS", None)
    with top("--url", url, "--interval", "0.1", stdout=theirs, env=environment) as process:
        os.close(theirs)
        seen = b""
        while seen.count(b"up ") < 2:
            seen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # it has closed the terminal
            while select.select([ours], [], [], SECONDS)[0]:
                seen += os.read(ours, 65536)
        assert process.wait(SECONDS) == 0
    os.close(ours)
    shown = seen.decode(errors="replace")  # it may be interrupted within a character
    assert shown.rindex("\x1b[?1049l") > shown.rindex("\x1b[?1049h")  # the screen that was there before is back
    plain = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", shown.replace("\x1b[H", "\n"))  # each picture begins at the top
    assert all(word in plain for word in ("p50 ms", "p99 ms", "queue", "process rss"))
    assert ("rows/run" in plain) is (columns == 140)
    assert max(len(line.rstrip("\r")) for line in plain.split("\n")) <= columns


@pytest.mark.parametrize("arguments", [(), ("--once",), ("--json",)], ids=str)
def test_no_server_at_the_start(arguments: tuple[str, ...]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{free.getsockname()[1]}"
        assert "UNAVAILABLE" in refusal(fewheads("top", "--url", url, *arguments), 6)


def test_an_interval_that_is_too_short(url: str) -> None:
    done = fewheads("top", "--url", url, "--interval", "0.01")
    assert done.returncode == 2
    assert "0.1<=x<=3600" in done.stderr


@pytest.mark.slow
def test_it_survives_a_restart_of_the_server() -> None:
    with ExitStack() as stack:
        with running_server([ORACLE_BUNDLE]) as ready:
            url = f"127.0.0.1:{ready.grpc_port}"
            process = stack.enter_context(top("--url", url, "--interval", "0.1", "--json"))
            readings = lines(process.stdout)
            ask(url, 50)
            while answered(next(readings)) < 50:
                pass
        stack.enter_context(running_server([ORACLE_BUNDLE], arguments=[f"--grpc-port={ready.grpc_port}"]))
        ask(url, 2)
        for reading in readings:
            if answered(reading) < 50:
                assert all(model["answers"] in (0, 1, 2) for model in reading["window"]["models"])  # not 50 fewer
            if answered(reading) == 2:
                break
        error = interrupted(process)
    assert f"waiting for the server: Watch at {url}: got UNAVAILABLE" in error
    assert error.splitlines()[-1] == "the server is back"


def answered(reading: Any) -> int:
    return sum(int(model["success_count"]) for model in reading["models"])


@pytest.mark.slow
def test_a_server_that_falls_silent_is_waited_for() -> None:
    """As a board does that has lost its power: no byte says that it has gone."""
    with (
        running_server([ORACLE_BUNDLE]) as ready,
        top("--url", f"127.0.0.1:{ready.grpc_port}", "--interval", "0.1", stdout=subprocess.DEVNULL) as process,
    ):
        assert process.stderr is not None
        time.sleep(3)
        os.kill(ready.process_id, signal.SIGSTOP)
        try:
            assert "got nothing for 5.1 s, expected a reading" in process.stderr.readline()
        finally:
            os.kill(ready.process_id, signal.SIGCONT)
        assert process.stderr.readline() == "the server is back\n"
        assert interrupted(process) == ""


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 s"),
        (59.9, "59 s"),
        (60, "1 min 0 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (90061, "1 d 1 h"),
        (1e7, "115 d 17 h"),
    ],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said
