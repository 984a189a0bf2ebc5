"""Levels, formats and changes of the server's log."""

import logging
import re
import socket
from contextlib import closing
from contextvars import copy_context

import msgspec
import pytest

from edge.errors import InvalidRequest, Unsupported
from edge.instruments.logs import ABOUT, LEVELS, About, Logs
from tests.support.server_processes import served

OURS, OTHERS = logging.getLogger("edge.of.this.test"), logging.getLogger("another.library")


def written(capsys):
    """Log a message of each level, from this program and from a library, and return what is written."""
    capsys.readouterr()
    for logger, name in ((OURS, "ours"), (OTHERS, "others")):
        for level in LEVELS:
            getattr(logger, level)("%s %s", name, level)
    return [line.split(": ", 1)[1] for line in capsys.readouterr().err.splitlines()]


@pytest.mark.parametrize(("level", "count"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_levels(capsys, level, count):
    with closing(Logs(level)):
        assert written(capsys) == [f"{name} {level}" for name in ("ours", "others") for level in LEVELS[-count:]]
    assert written(capsys) == []


def test_each_level_can_be_changed_alone(capsys):
    with closing(Logs()) as logs:
        logs.change({"log_info": False, "log_error": False, "log_verbose_level": 1})
        assert written(capsys) == ["ours debug", "ours warning", "others warning"]
        logs.change({"log_warning": False, "log_verbose_level": 2})
        assert written(capsys) == ["ours debug", "others debug"]
        logs.change({"log_verbose_level": 0})
        assert written(capsys) == []


def test_disconnected_clients_of_grpcio_are_logged_only_when_verbose(capsys):
    core, disconnected = logging.getLogger("grpc._cython.cygrpc"), "ExecuteBatchError raised in core by servicer method"
    with closing(Logs()) as logs:
        core.error(disconnected)
        core.error("something else")
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("ERROR grpc._cython.cygrpc: something else")
        logs.change({"log_verbose_level": 2})
        core.error(disconnected)
        assert capsys.readouterr().err.endswith(f"ERROR grpc._cython.cygrpc: {disconnected}\n")


def test_messages_name_their_request_and_clients_cannot_forge_a_line(capsys):
    forged = 'x"\n2026-01-01 ERROR forged'

    def log():
        ABOUT.set(About("m", forged))
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
    assert line == {"level": "error", "logger": OURS.name, "message": "it failed", "model": "m", "request_id": forged}
    assert text[0].endswith("it failed [model 'm', request 'x\"\\n2026-01-01 ERROR forged']")
    assert not any(line.startswith("2026-01-01") for line in text)


@pytest.mark.parametrize("log_format", ["default", "json"])
def test_messages_are_bounded_and_safe_for_a_terminal(capsys, monkeypatch, log_format):
    def log():
        ABOUT.set(About("m" * 10**6, "r" * 10**6))
        try:
            raise ValueError("\x1b[2J\n2026-01-01 ERROR forged" + "x" * 10**6)
        except ValueError:
            OURS.exception("/path/\x1b[2J\udcff\n2026-01-01 ERROR forged%s", "x" * 10**6)

    for handler in logging.getLogger().handlers:  # pytest's own could not pass the lone surrogate on to another process
        monkeypatch.setattr(handler, "level", logging.CRITICAL)
    with closing(Logs(log_format=log_format)):
        copy_context().run(log)
    written = capsys.readouterr().err
    assert 10_000 < len(written) < 25_000
    assert not re.search(r"^2026-01-01", written, re.M)
    assert "\x1b" not in written
    assert "ValueError: " in written
    assert written.encode()


def test_paths_of_http_requests_are_escaped_and_queries_left_out(tmp_path):
    lines = (
        b"GET /v2/models/a%%1b[2J?token=%s HTTP/1.1",
        b"GET /v2/\x1b[31mred?%s HTTP/1.1",
        b"GET /a?b'%s HTTP/1.1",
        b"GET /a?b %s c HTTP/1.1",
        b"GET /a?%s",
    )
    with served(tmp_path, "--log-level=debug", "--http-port=0") as server:
        for port in (server.ready.metrics_port, server.ready.http_port):
            for line in lines:
                with socket.create_connection(("127.0.0.1", port or 0), timeout=10) as connection:
                    connection.sendall(line % b"secret" + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    while connection.recv(1024):
                        pass
        code, log = server.stop()
    assert code == 0
    assert "/v2/models/a\\x1b[2J: Request for unknown model" in log
    assert "secret" not in log
    assert "\x1b" not in log


def test_wrong_setting_changes_none():
    for wrong, error, message in (
        ({"zz": True}, InvalidRequest, "log setting: got 'zz', expected one of log_file, log_info, "),
        ({"log_info": 1}, InvalidRequest, "log setting 'log_info': got 1, expected a value of type bool. "),
        ({"log_info": None}, InvalidRequest, "log setting 'log_info': got no value, expected a value of type bool. "),
        ({"log_verbose_level": True}, InvalidRequest, "log setting 'log_verbose_level': got True, expected a value of"),
        ({"log_format": "xml"}, InvalidRequest, "log setting 'log_format': got 'xml', expected one of default, "),
        ({"log_file": "/x"}, Unsupported, "log setting 'log_file': got '/x', expected nothing: the log goes to stderr"),
    ):
        with closing(Logs()) as logs:
            before = logs.settings
            with pytest.raises(error, match=f"^{re.escape(message)}"):
                logs.change({"log_info": False, "log_verbose_level": 1, **wrong})
            assert logs.settings == before
            logs.change({"log_file": ""})
