"""Helpers for build processes in tests: find them, and pause one in the middle."""

import os
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]


def children():
    """Return the ids of this process's build processes."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            command = (path.parent / "cmdline").read_bytes()
            if int(fields[1]) == os.getpid() and b"edge.runtimes.build_process" in command:
                found.add(int(path.parent.name))
    return found


def wait_for_no_children():
    end = time.monotonic() + 10
    while children():
        assert time.monotonic() < end, f"children are left: {children()}"
        time.sleep(0.02)


def pause_builds(monkeypatch, directory):
    """Let new Python processes stop for a minute in the middle of writing a build; ``directory`` gets the code."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text("""import time
from edge.runtimes import cache
def write(directory, record, data):
    (directory / record.file).write_bytes(data[:10])
    time.sleep(60)
cache.write = write
""")
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(directory), str(ROOT), before))))
