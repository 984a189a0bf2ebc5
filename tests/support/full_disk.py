"""Commands on a full or read-only disk.

python -m tests.support.conditions KIND DIRECTORY COMMAND ...      `fewheads COMMAND ...`, where

- ``read-only``: DIRECTORY cannot be written;
- ``no-room``: no file can be written, and writing to stderr fails. DIRECTORY is ignored.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys

_MOUNT = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'


def _command(directory: str, *command: str) -> list[str]:
    return ["unshare", "-rm", "sh", "-c", _MOUNT, directory, *command]


def can_mount(directory: str) -> bool:
    """Return whether users of this machine may mount file systems."""
    try:
        return not subprocess.run(_command(directory, "true"), check=False).returncode
    except FileNotFoundError:
        return False


def main() -> None:
    kind, directory, *arguments = sys.argv[1:]
    command = [sys.executable, "-m", "edge", *arguments]
    if kind == "no-room":
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    else:
        command = _command(directory, *command)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
