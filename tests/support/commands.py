"""The program as a user starts it: a process of its own, its output and its exit code."""

import os
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from edge.__main__ import cli
from edge.errors import FewheadsError

SECONDS = 120


def fewheads(*arguments, **variables):
    return run([sys.executable, "-m", "edge", *map(str, arguments)], **variables)


def python(code, *arguments, **variables):
    return run([sys.executable, "-c", code, *arguments], **variables)


def run(command, **variables):
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **variables})


def answer(done):
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(done, code):
    """Return the one line that reports a user's mistake, without a traceback and without any result."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("fewheads: ")
    assert re.search(r"[:,] expected ", line)
    return line


@contextmanager
def closed_address():
    """Yield an address that is bound and has no listener: connections are refused."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def ran(*arguments):
    """Run a command in this process; return its exit code, stdout and stderr."""
    return CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False)


def shown(*arguments):
    """Return the output of a command that succeeds in this process."""
    result = ran(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def mistake(*arguments, code=2):
    """Return the message of the error that a command raises in this process, with its exit code."""
    with pytest.raises(FewheadsError) as caught:
        cli.main([*map(str, arguments)], standalone_mode=False)
    assert caught.value.exit_code == code
    return str(caught.value)


def progress_line(capsys):
    """Return the second line of progress from now: the first may be of an earlier state."""
    lines = []
    while len(lines) < 2:
        time.sleep(0.01)
        lines += capsys.readouterr().err.splitlines()
    return lines[-1]
