"""The program as a user starts it: a process of its own, its output and its exit code."""

from __future__ import annotations

import os
import subprocess
import sys

SECONDS = 120

Done = subprocess.CompletedProcess


def fewheads(*arguments: object, **variables: str) -> Done[str]:
    command = [sys.executable, "-m", "edge", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **variables})


def python(code: str, *arguments: str, **variables: str) -> Done[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **variables})


def answer(done: Done[str]) -> str:
    """The output of a command that ended well."""
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(done: Done[str], code: int) -> str:
    """The one line that a user's mistake ends in, without a traceback and without any result."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("fewheads: ")
    assert ": got " in line
    assert ", expected " in line
    return line
