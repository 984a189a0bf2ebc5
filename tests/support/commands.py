"""The program as a user starts it: a process of its own, its output and its exit code."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from edge.__main__ import cli
from edge.errors import FewheadsError

SECONDS = 120

Done = subprocess.CompletedProcess


def fewheads(*arguments: object, **variables: str) -> Done[str]:
    return run([sys.executable, "-m", "edge", *map(str, arguments)], **variables)


def python(code: str, *arguments: str, **variables: str) -> Done[str]:
    return run([sys.executable, "-c", code, *arguments], **variables)


def run(command: list[str], **variables: str) -> Done[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **variables})


def answer(done: Done[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(done: Done[str], code: int) -> str:
    """Return the one line that reports a user's mistake, without a traceback and without any result."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("fewheads: ")
    assert re.search(r"[:,] expected ", line)
    return line


@contextmanager
def closed_address() -> Iterator[str]:
    """Yield an address that is bound and has no listener: connections are refused."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def shown(*arguments: object) -> str:
    """Return the output of a command that succeeds in this process."""
    result = CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def mistake(*arguments: object, code: int = 2) -> str:
    """Return the message of the error that a command raises in this process, with its exit code."""
    with pytest.raises(FewheadsError) as caught:
        cli.main([*map(str, arguments)], standalone_mode=False)
    assert caught.value.exit_code == code
    return str(caught.value)
