"""Independent jobs, each in a process and with a log of its own, on this machine or on a Ray cluster.

A process has one thread: its sums are those of a run without other jobs, and the jobs do not compete for cores.
"""

from __future__ import annotations

import logging
import os
import pickle
import platform
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from edge import __version__
from edge.cli.output import progress, remark, working
from edge.errors import Raw, UsageError, printable
from export.errors import JobError
from export.training.provenance import cores

if TYPE_CHECKING:
    from export.training.device import DeviceName

_POLL_SECONDS, _CONNECT_SECONDS = 0.2, 10.0
_TAIL_BYTES, _LONGEST_CHARS = 4096, 160
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class ProcessJob(NamedTuple):
    """A call in a process of its own.

    Attributes:
        name: unique among the jobs that run together; a file name without a suffix.
        function: at the top level of a module. What it prints goes to the log; it and its arguments are pickled.
    """

    name: str
    function: Callable[..., object]
    arguments: tuple[Any, ...]


class Outcome(NamedTuple):
    """The end of a job: what the function returned, or the error of a failed one, which names its log."""

    job: ProcessJob
    seconds: float
    result: Any = None
    error: JobError | None = None


#: What the call returned, and why it failed, in a line, or None.
_Ended: TypeAlias = tuple[Any, str | None]
#: Runs a pickled call with a log until it ends or the event is set.
_Run: TypeAlias = Callable[[bytes, Path, threading.Event], _Ended]


def run_jobs(
    jobs: Sequence[ProcessJob],
    *,
    logs: Path,
    workers: int | None = None,
    ray: str | None = None,
    gpu: bool = False,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> None:
    """Run jobs, several at a time, and show the last line of each one's log.

    A failed job does not stop the others. When this returns or raises, on Ctrl-C too, all processes have ended.

    Args:
        logs: a directory for ``NAME.log``, to which a second run of a job appends.
        workers: the most jobs at a time; None is one for each core, or each GPU, of this machine or the cluster.
        ray: a cluster's address, ``auto`` for the one that this machine belongs to, or ``local`` to start one here.
            Its nodes see the working directory, the data and ``logs`` at the same paths. None is this machine.
        gpu: whether each job gets a GPU, which no other job sees.
        on_outcome: called after each job, in the caller's thread.

    Raises:
        JobError: some jobs failed; the others are finished.
        UsageError: the cluster cannot be used, or has no GPU.
    """
    assert len({job.name for job in jobs}) == len(jobs), "two jobs would share a log"
    if not jobs:
        return
    logs.mkdir(parents=True, exist_ok=True)
    logs = logs.resolve()
    failed, stop = [], threading.Event()
    with _workers(ray, gpu=gpu) as (run, number), ThreadPoolExecutor(workers or number) as pool:
        try:
            waiting = {pool.submit(_outcome, job, logs / f"{job.name}.log", run, stop): job for job in jobs}
            with progress() as bar:
                task = bar.add_task("jobs", total=len(jobs), note="")
                while waiting:
                    done, _ = wait(waiting, _POLL_SECONDS, FIRST_COMPLETED)
                    for future in done:
                        del waiting[future]
                        outcome = future.result()
                        if outcome.error:
                            failed.append(outcome.job.name)
                            remark(str(outcome.error))
                        on_outcome(outcome)
                        bar.advance(task)
                    running = [job.name for future, job in waiting.items() if future.running()]
                    lines = (f"{name}: {_last_line(logs / f'{name}.log')}" for name in running)
                    bar.update(task, note="; ".join(lines))
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    if failed:
        given = Raw(f"{len(failed)} of {len(jobs)} that failed: {', '.join(failed)}")
        fix = f"Read their logs in {logs}, and give the same command: it runs what is missing."
        raise JobError("jobs", given=given, expected="all of them to finish", fix=fix)


def use_gpus(device: DeviceName, ray: str | None) -> bool:
    """Return whether each job gets a GPU; ``auto`` is one of this machine where torch has it, and none of a cluster.

    Raises:
        UsageError: a GPU of this machine is wanted, and torch has none.
    """
    if ray is not None:
        return device == "cuda"
    from export.training.device import device_of

    return device_of(device).type == "cuda"


def _outcome(job: ProcessJob, log: Path, run: _Run, stop: threading.Event) -> Outcome:
    started = time.perf_counter()
    try:
        result, reason = run(pickle.dumps((job.function, job.arguments)), log, stop)
    except OSError as problem:  # such as no memory for another process, or no space for the log
        result, reason = None, str(problem)
    seconds = time.perf_counter() - started
    if reason is None:
        return Outcome(job, seconds, result)
    fix = f"Read {log}, and give the same command again."
    error = JobError(f"job {job.name}", given=Raw(reason), expected="a result", fix=fix)
    return Outcome(job, seconds, error=error)


@contextmanager
def _workers(ray: str | None, *, gpu: bool) -> Iterator[tuple[_Run, int]]:
    """Yield how to run a call, and how many at a time without competing for cores or GPUs."""
    if ray is not None:
        with _cluster(ray, gpu=gpu) as cluster:
            yield cluster
    elif gpu:
        import torch

        free = SimpleQueue[int]()
        for index in range(number := torch.cuda.device_count()):
            free.put(index)

        def run(call: bytes, log: Path, stop: threading.Event) -> _Ended:
            index = free.get()
            try:
                return run_in_process(call, log, stop, gpu=index)
            finally:
                free.put(index)

        yield run, number
    else:
        yield run_in_process, cores()


def run_in_process(call: bytes, log: Path, stop: threading.Event, *, gpu: int | None = None) -> _Ended:
    """Run a pickled call in a process, which is killed when another thread sets ``stop``.

    Args:
        gpu: the index of the only GPU, of those that this process sees, that the process sees; None is all of them.
    """
    spawn = get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_in_process, args=(call, str(log), gpu, sender))
    process.start()
    sender.close()
    try:
        while not stop.is_set():
            if receiver.poll(_POLL_SECONDS):  # a result, or the end of the process
                ended: _Ended = receiver.recv()
                process.join()
                return ended
        return None, "an end on request"
    except EOFError:
        process.join()
        code = process.exitcode or 0
        return None, f"an end by {signal.Signals(-code).name}" if code < 0 else f"an end with exit code {code}"
    finally:
        process.kill()
        process.join()
        receiver.close()


def _in_process(call: bytes, log: str, gpu: int | None, sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it, and ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(dict.fromkeys(_THREADS, "1"))  # before the call's own modules are imported
    if torch := sys.modules.get("torch"):  # imported already, where the program of the parent imports it
        torch.set_num_threads(1)
    if gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
    sender.send(_logged(call, log))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait_for([parent.sentinel])
    os._exit(1)


def _logged(call: bytes, log: str) -> _Ended:
    """Run a pickled call, all output of which is appended to the log."""
    with open(log, "ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    print(f"starts in process {os.getpid()} on {platform.node()}", flush=True)
    try:
        function, arguments = pickle.loads(call)
        return function(*arguments), None
    except Exception as error:
        traceback.print_exc()
        return None, _short("".join(traceback.format_exception_only(error)).strip().rpartition("\n")[2])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


@contextmanager
def _cluster(address: str, *, gpu: bool) -> Iterator[tuple[_Run, int]]:
    import ray

    subject = f"--ray {address}"
    local: dict[str, Any] = {"num_cpus": cores(), "include_dashboard": False} if address == "local" else {}
    try:
        with working(f"connecting to Ray at {address}"):
            host, _, port = address.removeprefix("ray://").rpartition(":")
            if port.isdecimal():  # where nobody listens, Ray would try for minutes
                socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
    except Exception as error:  # of any class: a node that starts too slowly is a plain Exception
        expected = "local, auto, or the address of a running cluster"
        fix = "Start one with 'ray start --head', give --ray local, or leave --ray out."
        raise UsageError(subject, given=Raw(_short(str(error))), expected=expected, fix=fix) from None
    try:
        kind = "GPU" if gpu else "CPU"
        number = int(ray.cluster_resources().get(kind, 0))
        if not number:
            fix = "Add a node that has one, or leave --ray out."
            raise UsageError(subject, given=Raw(f"no {kind}"), expected="one for each job", fix=fix)
        # No retries: a job that takes too much memory would end its node again. Each call gets a fresh process.
        environment = {"env_vars": dict.fromkeys(_THREADS, "1")}
        options = {"num_cpus": 1, "num_gpus": int(gpu), "max_retries": 0, "max_calls": 1, "runtime_env": environment}
        task = ray.remote(**options)(run_on_node)

        def run(call: bytes, log: Path, stop: threading.Event) -> _Ended:
            reference = task.remote(call, str(log), os.getcwd(), __version__)
            while not ray.wait([reference], timeout=_POLL_SECONDS)[0]:
                if stop.is_set():
                    ray.cancel(reference, force=True)
                    return None, "an end on request"
            try:
                ended: _Ended = ray.get(reference)
            except ray.exceptions.RayError as error:
                return None, _short(str(error))
            return ended if ended[1] or log.exists() else (None, f"a log that this machine does not see: {log}")

        yield run, number
    finally:
        ray.shutdown()


def run_on_node(call: bytes, log: str, directory: str, version: str) -> _Ended:
    """Run a call on a node of a cluster, if that has the version and the files of the machine that sent it."""
    if version != __version__:
        return None, f"Fewheads {__version__} on node {platform.node()}, and {version} here"
    for path in (directory, os.path.dirname(log)):
        if not os.path.isdir(path):
            return None, f"no {path} on node {platform.node()}"
    os.chdir(directory)
    return _logged(call, log)


def _last_line(log: Path) -> str:
    if not log.exists():
        return ""
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return _short(file.read().decode(errors="replace").strip().rpartition("\n")[2])


def _short(text: str) -> str:
    line = printable(text.strip().partition("\n")[0])
    return line if len(line) <= _LONGEST_CHARS else f"{line[:_LONGEST_CHARS]}…"
