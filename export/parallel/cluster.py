"""Jobs on a Ray cluster: a task starts the process of a job on some node, and waits for it.

The nodes share the working directory, the data and the results with the machine that gives the command, at the same
paths, such as on a network file system. Each needs Fewheads in the same version.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

from edge import __version__
from edge.cli.output import working
from edge.errors import Raw, UsageError
from export.training.jobs import run_in_process
from export.training.provenance import cores

_LOOK_SECONDS, _CONNECT_SECONDS = 0.5, 10.0


class Cluster(NamedTuple):
    """A Ray cluster that this process is connected to.

    Attributes:
        task: runs a call on a node.
        number: of its processors, or GPUs.
    """

    ray: Any
    task: Any
    number: int

    def run(self, call: bytes, log: Path, stop: threading.Event) -> str | None:
        """Run the call of a job on a node until it ends or ``stop`` is set; return why it failed, or None."""
        reference = self.task.remote(call, str(log), os.getcwd())
        while not self.ray.wait([reference], timeout=_LOOK_SECONDS)[0]:
            if stop.is_set():
                self.ray.cancel(reference, force=True)  # ends the worker, with which the child ends
                return "an end on request"
        try:
            return self.ray.get(reference)  # type: ignore[no-any-return]
        except self.ray.exceptions.RayError as error:
            return _first_line(error)


@contextmanager
def open_cluster(address: str, logs: Path, *, gpu: bool) -> Iterator[Cluster]:
    """Connect to a cluster while the block runs.

    Args:
        address: ``local`` starts one on this machine and ends it, ``auto`` is the one that this machine is a node of;
            any other is passed to ``ray.init``.
        logs: an existing directory, which all nodes must share.
        gpu: whether each job gets a GPU.

    Raises:
        UsageError: there is no cluster, it has no GPU, or a node does not share ``logs`` or the working directory.
    """
    import ray

    own = {"num_cpus": cores(), "include_dashboard": False} if address == "local" else {}
    subject = f"--ray {address}"
    try:
        with working(f"connecting to Ray at {address}"):
            _check_listener(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except Exception as error:  # of any class: a node that starts too slowly is a plain Exception
        expected = "local, auto, or the address of a running cluster"
        fix = "Start one with 'ray start --head', give --ray local, or leave --ray out."
        raise UsageError(subject, given=Raw(_first_line(error)), expected=expected, fix=fix) from None
    try:
        number = int(ray.cluster_resources().get("GPU" if gpu else "CPU", 0))
        if not number:
            given = Raw("no GPU" if gpu else "no processor")
            fix = "Add a node that has one, or leave --ray out."
            raise UsageError(subject, given=given, expected="one for each job", fix=fix)
        _check_nodes(ray, subject, logs)
        # No retries: the job would resume, but a job that takes too much memory would end its node again.
        task = ray.remote(num_cpus=1, num_gpus=int(gpu), max_retries=0)(_run_on_node)
        yield Cluster(ray, task, number)
    finally:
        ray.shutdown()


def _check_listener(address: str) -> None:
    """Raise an OSError if nobody listens at an address; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()


def _run_on_node(call: bytes, log: str, directory: str) -> str | None:
    os.chdir(directory)
    return run_in_process(call, Path(log), threading.Event())


def _check_nodes(ray: Any, subject: str, logs: Path) -> None:
    """Let each node read a file of this machine and write one, and look for it here."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    with NamedTemporaryFile(dir=logs, prefix=".shared-") as file:
        probe = ray.remote(num_cpus=0, max_retries=0)(_probe)
        for node in nodes:
            name = node["NodeManagerHostname"]
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            written = Path(f"{file.name}-{node['NodeID']}")
            try:
                answer = probe.options(scheduling_strategy=place)
                problem = ray.get(answer.remote(__version__, os.getcwd(), file.name, str(written)))
            except ray.exceptions.RayError as error:
                problem = _first_line(error)
            if problem is None and not written.exists():
                problem = f"files in {logs} that this machine does not see"
            written.unlink(missing_ok=True)
            if problem:
                expected = f"Fewheads {__version__}, and the working directory and {logs} at the same paths as here"
                fix = "Mount a file system that all nodes share, and give an --out on it."
                raise UsageError(subject, given=Raw(f"node {name}: {problem}"), expected=expected, fix=fix)


def _probe(version: str, directory: str, file: str, written: str) -> str | None:
    if version != __version__:
        return f"Fewheads {__version__}"
    for path in (directory, file):
        if not os.path.exists(path):
            return f"no {path}"
    try:
        Path(written).touch()
    except OSError as error:
        return str(error)
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
