"""Ctrl-C in tests; and ``--no-processes``: skip every test as soon as it starts a process, for ``make quick``."""

import os
import signal
import sys

import pytest

#: The audit events of a new process.
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec"}


def pytest_addoption(parser):
    parser.addoption(
        "--no-processes", action="store_true", help="skip every test that starts a process, such as a server"
    )


def pytest_configure(config):
    # A shell ignores SIGINT in background jobs, also for their children. Those of a process with a handler get it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--no-processes"):
        sys.addaudithook(_refuse)  # for good: hooks cannot be removed


def pytest_runtest_teardown():
    # A server that a test runs in this process leaves the handler of its event loop.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _refuse(event, arguments):
    """Skip the running test, so that no list of such tests has to be kept."""
    if event in _STARTS and "PYTEST_CURRENT_TEST" in os.environ:  # pytest has it in tests and fixtures, not in imports
        pytest.skip("starts a process")
