"""Runs that do not end, shutdowns that would wait for them, and notifications as systemd receives them."""

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edge.cli.serve import serve
from edge.health.supervisor import Notifier
from edge.pb import inference_pb2 as pb
from edge.pb import telemetry_pb2
from edge.settings import Settings
from tests.support import server_processes
from tests.support.metrics import gauge, wait_until
from tests.support.models import write_oracle_bundle
from tests.support.server_models import busy, write_busy_bundle
from tests.support.server_processes import NOT_SERVING, SERVING, is_ready, model_states, problems, served

#: Between 0.8 s and 4 s; nothing longer may come before, since the usual time of a tier raises its limit.
LONG = 4000
#: Many minutes on any machine.
FOR_EVER = 10**9


@pytest.fixture
def repository(tmp_path):
    directory = tmp_path / "repository"
    write_busy_bundle(directory)
    write_oracle_bundle(directory / "oracle", "oracle", 1)
    return directory


def test_long_run_makes_the_server_unready_until_it_ends(repository):
    def healths(server):
        return {server_processes.health(server, name) for name in ("", "busy", "oracle")}

    with served(repository, "--watchdog-seconds=0.3", "--instances=1") as server:
        assert (is_ready(server), problems(server)) == (True, [])
        long = server.stub.ModelInfer.future(busy(LONG))
        assert wait_until(lambda: not is_ready(server), 10)
        ((problem,), states) = problems(server), model_states(server)
        # The limit is 0.3 s, or ten times the usual time where that is more.
        assert re.fullmatch(r"a run of busy:1 \(tier full\) takes longer than its limit of \d\.\d s", problem)
        # It occupies the only worker, so the other model is not computed either.
        assert states == {"busy": ("UNAVAILABLE", problem), "oracle": ("UNAVAILABLE", problem)}
        assert not server.stub.ModelReady(pb.ModelReadyRequest(name="busy")).ready
        assert gauge(server.ready, "problems") == 1
        assert wait_until(lambda: healths(server) == {NOT_SERVING}, 2)
        assert long.result().raw_output_contents[0] == np.int64(LONG).tobytes()
        assert (is_ready(server), problems(server)) == (True, [])
        assert wait_until(lambda: healths(server) == {SERVING}, 2)


def test_only_the_stuck_model_is_unready_while_a_worker_is_left(repository):
    with served(repository, "--watchdog-seconds=0.3", "--instances=2", "--stuck-exit-seconds=inf") as server:
        call = server.stub.ModelInfer.future(busy(FOR_EVER))
        assert wait_until(lambda: not is_ready(server), 10)
        states = {name: state for name, (state, _) in model_states(server).items()}
        assert states == {"busy": "UNAVAILABLE", "oracle": "READY"}
        assert not call.done()


def test_run_that_never_ends_ends_the_process(repository):
    with served(repository, "--watchdog-seconds=0.2", "--stuck-exit-seconds=0.2") as server:
        call = server.stub.ModelInfer.future(busy(FOR_EVER))
        code, log = server.end()
        assert code == 9
        (line,) = [line for line in log.splitlines() if line.startswith("fewheads: ")]
        assert line.startswith("fewheads: server: got a run of busy:1 (tier full) takes longer than")
        assert "onnxruntime_runner.py" in log  # the stack of the thread
        assert call.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.slow
def test_sigterm_ends_a_run_that_never_ends(repository):
    with served(repository, "--drain-seconds=0.2") as server:
        call = server.stub.ModelInfer.future(busy(FOR_EVER))
        time.sleep(0.5)
        begun = time.monotonic()
        code, log = server.stop()
        assert code == 10
        assert 3 < time.monotonic() - begun < 6
        assert "shutdown: got a run of busy:1 (tier full) after " in log.splitlines()[-1]
        assert "expected an end within 3.2 s" in log.splitlines()[-1]
        assert call.code() is not grpc.StatusCode.OK


def test_watchers_neither_delay_a_shutdown_nor_harm_each_other(repository):
    with served(repository, "--drain-seconds=30", "--model-control=explicit") as server:
        stub = health_pb2_grpc.HealthStub(server.channel)
        leaving, staying = (stub.Watch(health_pb2.HealthCheckRequest(service="oracle")) for _ in range(2))
        assert (next(leaving).status, next(staying).status) == (NOT_SERVING, NOT_SERVING)
        leaving.cancel()
        time.sleep(0.1)
        server.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="oracle"))
        while next(staying).status != SERVING:
            pass
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="zz"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watching = [
            server.stub.Watch(telemetry_pb2.WatchRequest(interval_ms=20_000)),
            stub.Watch(health_pb2.HealthCheckRequest(service="")),
        ]
        assert all(next(stream) for stream in watching)
        begun = time.monotonic()
        os.kill(server.ready.process_id, signal.SIGTERM)
        with pytest.raises(grpc.RpcError, match="going down"):
            next(watching[0])
        assert next(watching[1]).status == NOT_SERVING
        with pytest.raises(grpc.RpcError, match="going down"):
            next(watching[1])
        assert server.end()[0] == 0
        assert time.monotonic() - begun < 5


UNIT = Path(__file__).parents[2] / "deploy" / "fewheads.service"


class Listener:
    def __init__(self, address):
        self.address = address
        self.messages = []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0", 1) if address.startswith("@") else address)
        self.socket.setblocking(False)

    def read(self):
        with suppress(BlockingIOError):
            while True:
                self.messages.append(self.socket.recv(65536).decode())
        return self.messages


@pytest.fixture
def listener():
    listener = Listener(f"@fewheads-{secrets.token_hex(8)}")
    yield listener
    listener.socket.close()


def test_message_is_one_datagram_of_lines(listener, tmp_path):
    at_path = Listener(str(tmp_path / "notify"))
    for each in (listener, at_path):
        Notifier({"NOTIFY_SOCKET": each.address}).notify(READY=1, STATUS="two\nlines, é")
        assert each.read() == ["READY=1\nSTATUS=two lines, é"]
    at_path.socket.close()


def test_nothing_is_sent_without_a_supervisor_and_a_missing_socket_is_logged_once(tmp_path, caplog):
    for variables, warnings in (({}, 0), ({"NOTIFY_SOCKET": str(tmp_path / "none")}, 1)):
        notifier = Notifier(variables)
        for _ in range(3):
            notifier.notify(READY=1)
        assert len(caplog.records) == warnings


def test_full_socket_does_not_block(listener):
    notifier = Notifier({"NOTIFY_SOCKET": listener.address})
    for _ in range(2000):
        notifier.notify(STATUS="x")
    assert 0 < len(listener.read()) < 2000


def test_watchdog_interval_comes_from_the_environment():
    for variables, seconds in (
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "²"}, None),
        ({}, None),
        ({"WATCHDOG_USEC": "1000000", "NOTIFY_SOCKET": ""}, None),
    ):
        assert Notifier({"NOTIFY_SOCKET": "@x", **variables}).watchdog_seconds == seconds


def test_server_notifies_from_start_to_stop(listener, tmp_path):
    repository = write_oracle_bundle(tmp_path / "repository" / "oracle", "oracle", 1).path.parent
    write_busy_bundle(repository)
    given = {"NOTIFY_SOCKET": listener.address, "WATCHDOG_USEC": "600000"}
    with served(repository, "--watchdog-seconds=0.2", "--stuck-exit-seconds=inf", "--drain-seconds=0", **given) as it:
        assert wait_until(lambda: "READY=1" in listener.read())
        assert wait_until(lambda: "STATUS=2 of 2 models ready" in listener.read())
        assert wait_until(lambda: listener.read().count("WATCHDOG=1") > 2)
        it.stub.ModelInfer(busy(2000))
        assert wait_until(lambda: listener.read()[-1] == "WATCHDOG=1")
        assert it.stop()[0] == 0
    messages = listener.read()
    stuck = next(index for index, text in enumerate(messages) if "takes longer than its limit" in text)
    assert messages[stuck + 1] == "STATUS=2 of 2 models ready"  # without a ping in between, so that systemd acts
    assert messages.index("READY=1") < stuck < messages.index("STOPPING=1")


def unit():
    return dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE))


def seconds(time):
    number, of = re.fullmatch(r"(\d+)(s|min)", time).groups()
    return int(number) * (60 if of == "min" else 1)


def test_unit_agrees_with_the_server():
    command = unit()["ExecStart"].split()
    given = {word for word in command if word.startswith("--")}
    assert given <= {name for parameter in serve.params for name in parameter.opts}
    assert seconds(unit()["TimeoutStopSec"]) > float(command[command.index("--drain-seconds") + 1]) + 3
    assert seconds(unit()["WatchdogSec"]) > Settings.watchdog_seconds + Settings.stuck_exit_seconds


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit_and_rates_it_hardened(tmp_path):
    installed = tmp_path / UNIT.name
    installed.write_text(UNIT.read_text().replace("/opt/fewheads/bin/fewheads", shutil.which("true") or ""))
    verified = subprocess.run(["systemd-analyze", "verify", installed], capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=yes", "--no-pager", "--threshold=25", installed]
    judged = subprocess.run(command, capture_output=True, text=True)
    assert judged.returncode == 0, judged.stdout[-2000:]
