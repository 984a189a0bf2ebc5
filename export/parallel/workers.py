"""Where jobs run: processes of this machine, for each GPU one if wanted, or of a Ray cluster."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from edge.errors import Literally, UsageError
from export.parallel.process import run_in_process
from export.processor import cores


class Run(Protocol):
    """Runs a pickled call with a log until it ends or ``stop`` is set; returns why it failed, or None."""

    def __call__(self, call: bytes, log: Path, stop: threading.Event) -> str | None:
        """Return when the process of the call has ended."""


class Workers(NamedTuple):
    """How to run a job, and how many at a time without competing for cores or GPUs."""

    run: Run
    number: int


@contextmanager
def open_workers(ray: str | None, logs: Path, *, gpu: bool) -> Iterator[Workers]:
    """Yield the workers of a Ray cluster, or of this machine if ``ray`` is None.

    Args:
        logs: an existing directory, which all nodes of the cluster must share.
        gpu: whether each job gets a GPU, which no other job sees.

    Raises:
        UsageError: there is no GPU, or the cluster cannot be used.
    """
    if ray is not None:
        from export.parallel.cluster import open_cluster

        with open_cluster(ray, logs, gpu=gpu) as cluster:
            yield Workers(cluster.run, cluster.number)
    elif gpu:
        yield _gpus()
    else:
        yield Workers(run_in_process, cores())


def _gpus() -> Workers:
    import torch

    number, free = torch.cuda.device_count(), SimpleQueue[int]()
    if not number:
        fix = "Give --device cpu, or install torch for this machine's CUDA."
        raise UsageError("--device", given=Literally("none that torch finds"), expected="a GPU for each job", fix=fix)
    for index in range(number):
        free.put(index)

    def run(call: bytes, log: Path, stop: threading.Event) -> str | None:
        index = free.get()
        try:
            return run_in_process(call, log, stop, gpu=index)
        finally:
            free.put(index)

    return Workers(run, number)
