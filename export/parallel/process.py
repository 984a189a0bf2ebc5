"""One job in a child process, whose output is the job's log."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from edge.errors import printable

_LOOK_SECONDS = 0.2
_TAIL_BYTES = 4096
_LONGEST_CHARS = 160
#: One thread for each job: the sums are those of a run without other jobs, and the jobs do not compete for cores.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def run_in_process(call: bytes, log: Path, stop: threading.Event, *, gpu: int | None = None) -> str | None:
    """Run the call of a job in a child process, which is killed when another thread sets ``stop``.

    Args:
        log: what the process prints is appended to it.
        gpu: the index of the only GPU, of those that this process sees, that the child sees; None is all of them.

    Returns:
        Why the job failed, in a line; None if it did not.
    """
    command = [sys.executable, "-u", "-m", "export.parallel.child"]  # -u: all lines of the log in their order
    with open(log, "ab") as file:
        # In a session of its own: Ctrl-C reaches only the parent, which then ends the child.
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_ONE_THREAD, **_only(gpu)},
            start_new_session=True,
        )
        file.write(f"starts in process {child.pid} on {platform.node()}\n".encode())
    assert child.stdin is not None
    try:
        child.stdin.write(call)
        child.stdin.flush()
        while child.poll() is None and not stop.wait(_LOOK_SECONDS):
            pass
    except BrokenPipeError:  # it has died, as its exit code will show
        child.wait()
    finally:
        child.kill()
        code = child.wait()
        with suppress(BrokenPipeError):
            child.stdin.close()
    if code < 0:
        return f"an end by {signal.Signals(-code).name}"
    return last_line(log) if code else None


def _only(gpu: int | None) -> dict[str, str]:
    if gpu is None:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[gpu] if visible else str(gpu)}


def last_line(log: Path) -> str:
    """Return the last line of a log, cut to what fits on a screen; empty without one."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    found = printable(next((line for line in reversed(lines) if line.strip()), ""))
    return found if len(found) <= _LONGEST_CHARS else f"{found[:_LONGEST_CHARS]}…"
