"""Commands on a full or read-only disk.

python -m tests.support.full_disk KIND DIRECTORY COMMAND ...      `fewheads COMMAND ...`, where

- ``small``: DIRECTORY is a file system of 64 KiB;
- ``read-only``: DIRECTORY cannot be written;
- ``no-room``: no file can be written, and writing to stderr fails. DIRECTORY is ignored.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys

_MOUNTS = {
    "small": 'mount -t tmpfs -o size=64k none "$0" && exec "$@"',
    "read-only": 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"',
}


def _command(kind: str, directory: str, *command: str) -> list[str]:
    return ["unshare", "-rm", "sh", "-c", _MOUNTS[kind], directory, *command]


def can_mount(directory: str) -> bool:
    """Return whether users of this machine may mount file systems."""
    try:
        return all(not subprocess.run(_command(kind, directory, "true"), check=False).returncode for kind in _MOUNTS)
    except FileNotFoundError:
        return False


def main() -> None:
    kind, directory, *arguments = sys.argv[1:]
    command = [sys.executable, "-m", "edge", *arguments]
    if kind == "no-room":
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    else:
        command = _command(kind, directory, *command)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
