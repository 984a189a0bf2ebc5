"""Programs that the tests of deploy/ run, and that a machine may lack."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def tool(name, install):
    """Return the path of a program of this environment or of the system, or skip the test and say how to install it."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if not found:
        pytest.skip(f"needs {name}: {install}")
    return found


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)
