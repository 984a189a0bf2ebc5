"""Levels, formats and changes of the server's log."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from contextvars import copy_context
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from edge.errors import InvalidRequest, RequestError, Unsupported
from edge.instruments.logs import ABOUT, LEVELS, About, Logs
from edge.server import Ready
from tests.support.commands import SECONDS
from tests.support.metrics import wait_until

OURS, OTHERS = logging.getLogger("edge.of.this.test"), logging.getLogger("another.library")


@pytest.fixture
def logs() -> Iterator[Logs]:
    with closing(Logs()) as logs:
        yield logs


def written(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Log a message of each level, from this program and from a library, and return what is written."""
    capsys.readouterr()
    for logger, name in ((OURS, "ours"), (OTHERS, "others")):
        for level in LEVELS:
            getattr(logger, level)("%s %s", name, level)
    return [line.split(": ", 1)[1] for line in capsys.readouterr().err.splitlines()]


@pytest.mark.parametrize(("level", "count"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_levels(capsys: pytest.CaptureFixture[str], level: str, count: int) -> None:
    with closing(Logs(level)):
        assert written(capsys) == [f"{name} {level}" for name in ("ours", "others") for level in LEVELS[-count:]]
    assert written(capsys) == []


def test_each_level_can_be_changed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(Logs()) as logs:
        logs.change({"log_info": False, "log_error": False, "log_verbose_level": 1})
        assert written(capsys) == ["ours debug", "ours warning", "others warning"]
        logs.change({"log_warning": False, "log_verbose_level": 2})
        assert written(capsys) == ["ours debug", "others debug"]
        logs.change({"log_verbose_level": 0})
        assert written(capsys) == []


def test_disconnected_clients_of_grpcio_are_logged_only_when_verbose(
    capsys: pytest.CaptureFixture[str], logs: Logs
) -> None:
    core = logging.getLogger("grpc._cython.cygrpc")
    core.error("ExecuteBatchError raised in core by servicer method [%s]", "/a/B")
    assert not capsys.readouterr().err
    core.error("something else")
    assert "something else" in capsys.readouterr().err
    logs.change({"log_verbose_level": 2})
    core.error("ExecuteBatchError raised in core by servicer method [%s]", "/a/B")
    assert "/a/B" in capsys.readouterr().err


def test_formats(capsys: pytest.CaptureFixture[str]) -> None:
    default = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO edge.of.this.test: x$"
    iso = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ INFO edge.of.this.test: x$"
    with closing(Logs()) as logs:
        for name, pattern in (("default", default), ("ISO8601", iso), ("default", default)):
            logs.change({"log_format": name})
            capsys.readouterr()
            OURS.info("x")
            assert re.match(pattern, capsys.readouterr().err)


def test_messages_name_their_request_and_clients_cannot_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def log() -> None:
        ABOUT.set(About("m", 'x"\n2026-01-01 ERROR forged'))
        try:
            raise ValueError("why")
        except ValueError:
            OURS.exception("it failed")

    with closing(Logs(log_format="json")) as logs:
        OURS.info("alone")
        copy_context().run(log)
        logs.change({"log_format": "default"})
        copy_context().run(log)
    alone, about, *text = capsys.readouterr().err.splitlines()
    assert "request_id" not in msgspec.json.decode(alone)
    line = msgspec.json.decode(about)
    assert re.match(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$", line.pop("time"))
    assert "ValueError: why" in line.pop("exception")
    assert line == {
        "level": "error",
        "logger": OURS.name,
        "message": "it failed",
        "model": "m",
        "request_id": 'x"\n2026-01-01 ERROR forged',
    }
    assert text[0].endswith("it failed [model 'm', request 'x\"\\n2026-01-01 ERROR forged']")
    assert not any(line.startswith("2026-01-01") for line in text)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"zz": True}, InvalidRequest, "log setting: got 'zz', expected one of log_file, log_info, "),
        ({"log_info": 1}, InvalidRequest, "log setting 'log_info': got 1, expected a value of type bool. "),
        ({"log_info": None}, InvalidRequest, "log setting 'log_info': got no value, expected a value of type bool. "),
        ({"log_verbose_level": True}, InvalidRequest, "log setting 'log_verbose_level': got True, expected a value of"),
        ({"log_format": "xml"}, InvalidRequest, "log setting 'log_format': got 'xml', expected one of default, "),
        ({"log_file": "/x"}, Unsupported, "log setting 'log_file': got '/x', expected nothing: the log goes to stderr"),
    ],
)
def test_wrong_setting_changes_none(
    logs: Logs, wrong: dict[str, object], error: type[RequestError], message: str
) -> None:
    before = logs.settings
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        logs.change({"log_info": False, "log_verbose_level": 1, **wrong})
    assert logs.settings == before
    logs.change({"log_file": ""})


def test_tritonclient_changes_the_log_of_a_running_server(tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    command = [sys.executable, "-m", "edge", "serve", str(tmp_path / "repository"), "--grpc-port=0", "--no-metrics"]
    log = tmp_path / "log"
    with open(log, "wb") as stderr:
        process = subprocess.Popen([*command, "--allow-log-settings", "--json"], stdout=subprocess.PIPE, stderr=stderr)
        try:
            assert process.stdout is not None
            ready = msgspec.json.decode(process.stdout.readline(), type=Ready)
            with triton.InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client:
                _change_settings(client, log)
        finally:
            process.terminate()
            process.communicate(timeout=SECONDS)
    assert process.returncode == 0


def _change_settings(client: triton.InferenceServerClient, log: Path) -> None:
    def refused(name: str) -> None:
        tensor = triton.InferInput("x", [1], "FP32").set_data_from_numpy(np.zeros(1, np.float32))
        with pytest.raises(InferenceServerException):
            client.infer(name, [tensor])

    assert "logging" in client.get_server_metadata().extensions
    first = client.get_log_settings(as_json=True)["settings"]
    assert first == {
        "log_file": {"string_param": ""},
        "log_info": {"bool_param": True},
        "log_warning": {"bool_param": True},
        "log_error": {"bool_param": True},
        "log_verbose_level": {"uint32_param": 0},
        "log_format": {"string_param": "default"},
    }
    refused("before")
    changed = client.update_log_settings({"log_verbose_level": 1, "log_format": "ISO8601"}, as_json=True)["settings"]
    assert changed == {**first, "log_verbose_level": {"uint32_param": 1}, "log_format": {"string_param": "ISO8601"}}
    refused("meanwhile")
    client.update_log_settings({"log_verbose_level": 0})
    refused("after")
    assert wait_until(lambda: "'meanwhile'" in log.read_text(), 5)
    text = log.read_text()
    assert "'before'" not in text
    assert "'after'" not in text
    assert re.search(
        r"^\S+Z DEBUG edge.rpc.methods: ModelInfer: Request for unknown model 'meanwhile'", text, re.MULTILINE
    )
    trace = client.get_trace_settings(as_json=True)["settings"]
    assert trace["trace_level"] == {"value": ["OFF"]}
    assert (
        client.update_trace_settings(settings={"trace_level": None, "trace_rate": "1000"}, as_json=True)["settings"]
        == trace
    )
    with pytest.raises(InferenceServerException, match="--trace-endpoint"):
        client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})
