"""The command line with the files of a board.

python -m tests.support.conditions ROOT serve REPOSITORY ...      `fewheads serve`, with the sensors below ROOT
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from importlib import import_module
from pathlib import Path

import edge.instruments
from edge.__main__ import main


def move(root: Path) -> None:
    """Make ``root`` the default root in all of :mod:`edge.instruments`."""
    for found in pkgutil.iter_modules(edge.instruments.__path__):
        for member in vars(import_module(f"edge.instruments.{found.name}")).values():
            function = member.__init__ if inspect.isclass(member) else member
            if inspect.isfunction(function) and function.__defaults__:
                function.__defaults__ = tuple(root if value == Path("/") else value for value in function.__defaults__)


if __name__ == "__main__":
    move(Path(sys.argv.pop(1)))
    main()
