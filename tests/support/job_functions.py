"""Functions that tests run as jobs, in processes of their own."""

import os
import time
from pathlib import Path

from edge.errors import UsageError


def write_process(output):
    Path(output).write_text(f"{os.getpid()} {os.environ['OMP_NUM_THREADS']}")
    return Path(output).name


def meet(output, other):
    """Write the own process id, and return when the other job has written its own: only if both run at once."""
    name = write_process(output)
    deadline = time.monotonic() + 60
    while not Path(other).exists():
        assert time.monotonic() < deadline, "the other job does not run"
        time.sleep(0.05)
    return name


def fail(output):
    print("about to fail")
    raise UsageError("colour", given="blue", expected="red", fix="Paint it.")


def exit_early(output):
    os._exit(3)


def end_itself(output):
    os.kill(os.getpid(), 9)


def sleep(output, process):
    Path(process).write_text(str(os.getpid()))
    time.sleep(600)


def write_gpus(output):
    Path(output).write_text(os.environ["CUDA_VISIBLE_DEVICES"])
