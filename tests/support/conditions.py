"""The command line where something is unusual; each KIND takes its own argument.

python -m tests.support.conditions KIND ARGUMENT COMMAND ...      `fewheads COMMAND ...`, where

- ``board``: the sensors are below the directory ARGUMENT;
- ``read-only``: the directory ARGUMENT cannot be written;
- ``no-room``: no file can be written, and writing to stderr fails;
- ``runner``: every model has the runner ARGUMENT: ``lost`` or ``worn-out``.
"""

import dataclasses
import inspect
import os
import pkgutil
import resource
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import edge.instruments
from edge.__main__ import cli
from edge.__main__ import main as fewheads
from edge.repository import loader
from edge.runtimes.build import load_with

ILLEGAL = "cuMemcpyDtoHAsync failed: an illegal memory access was encountered"


class Faulty:
    """A lost GPU: an input below -1,000 makes this call and all later ones fail."""

    platform, device = "tensorrt_plan", "GPU"

    def __init__(self, inner=None):
        """Without a runner inside, the output ``y`` is the input ``x``."""
        self.broken = False
        self.inner = inner
        self.inputs = inner.inputs if inner else ()
        self.outputs = inner.outputs if inner else ()

    def infer(self, feeds):
        if self.broken or feeds["x"].min() < -1_000:
            self.broken = True
            raise RuntimeError(ILLEGAL)
        return self.inner.infer(feeds) if self.inner else {"y": feeds["x"]}

    def close(self):
        assert not self.broken, "a call on a lost device may never return"


class WornOut(Faulty):
    """A runner that fails from an input below -1,000 until one above 1,000."""

    device = "CPU"

    def infer(self, feeds):
        if feeds["x"].max() > 1_000:
            self.broken = False
        return super().infer(feeds)

    def close(self):
        pass


_MOUNT = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'


def _read_only(directory, *command):
    return ["unshare", "-rm", "sh", "-c", _MOUNT, directory, *command]


def can_mount(directory):
    """Return whether users of this machine may mount file systems."""
    try:
        return not subprocess.run(_read_only(directory, "true"), check=False).returncode
    except FileNotFoundError:
        return False


def move(root):
    """Make ``root`` the default root in all of :mod:`edge.instruments`."""
    for found in pkgutil.iter_modules(edge.instruments.__path__):
        for member in vars(import_module(f"edge.instruments.{found.name}")).values():
            function = member.__init__ if inspect.isclass(member) else member
            if inspect.isfunction(function) and function.__defaults__:
                function.__defaults__ = tuple(root if value == Path("/") else value for value in function.__defaults__)


def use(kind):
    def load(*arguments, **options):
        loaded = load_with(*arguments, **options)
        return dataclasses.replace(loaded, runner=kind(loaded.runner))

    loader.load_with = load


def main():
    kind, argument = sys.argv.pop(1), sys.argv.pop(1)
    command = [sys.executable, "-m", "edge", *sys.argv[1:]]
    if kind == "board":
        move(Path(argument))
        fewheads()
    elif kind == "runner":
        use({"lost": Faulty, "worn-out": WornOut}[argument])
        cli.main()
    elif kind == "no-room":
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
        os.execvp(command[0], command)
    else:
        command = _read_only(argument, *command)
        os.execvp(command[0], command)


if __name__ == "__main__":
    main()
