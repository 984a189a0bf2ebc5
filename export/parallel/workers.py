"""Where jobs run: processes of this machine, for each GPU one if wanted, or of a Ray cluster."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Protocol

from export.training.jobs import run_in_process
from export.training.provenance import cores

if TYPE_CHECKING:
    from export.training.device import DeviceName


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
        UsageError: the cluster cannot be used, or has no GPU.
    """
    if ray is not None:
        from export.training.jobs import open_cluster

        with open_cluster(ray, logs, gpu=gpu) as cluster:
            yield Workers(cluster.run, cluster.number)
    elif gpu:
        yield _gpus()
    else:
        yield Workers(run_in_process, cores())


def use_gpus(device: DeviceName, ray: str | None) -> bool:
    """Return whether each job gets a GPU; ``auto`` is one of this machine where torch has it, and none of a cluster.

    Raises:
        UsageError: a GPU of this machine is wanted, and torch has none.
    """
    if ray is not None:
        return device == "cuda"
    from export.training.device import device_of

    return device_of(device).type == "cuda"


def _gpus() -> Workers:
    import torch

    number, free = torch.cuda.device_count(), SimpleQueue[int]()
    for index in range(number):
        free.put(index)

    def run(call: bytes, log: Path, stop: threading.Event) -> str | None:
        index = free.get()
        try:
            return run_in_process(call, log, stop, gpu=index)
        finally:
            free.put(index)

    return Workers(run, number)
