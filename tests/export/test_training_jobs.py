"""Jobs in processes of their own; the functions that they call are in tests/support/job_functions.py."""

import importlib.util
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from edge import __version__
from edge.errors import UsageError
from export.errors import JobError
from export.training.jobs import ProcessJob, run_in_process, run_jobs, run_on_node
from tests.support import job_functions
from tests.support.commands import SECONDS, answer, closed_address, run

ROOT = Path(__file__).parents[2]
has_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray (extra 'ray') is not installed")


def job(place, name, function=job_functions.write_process, *arguments):
    return ProcessJob(name, function, (place / name, *arguments))


def written(place, *names):
    return [(place / name).read_text().split() for name in names]


def pair(place):
    """Return two jobs that end only if both run at once."""
    return [job(place, "one", job_functions.meet, place / "two"), job(place, "two", job_functions.meet, place / "one")]


def test_jobs_run_at_once_in_processes_with_one_thread(tmp_path):
    outcomes = []
    run_jobs(pair(tmp_path), logs=tmp_path / "logs", workers=2, on_outcome=outcomes.append)
    (one, threads), (two, _) = written(tmp_path, "one", "two")
    assert len({one, two, str(os.getpid())}) == 3
    assert threads == "1"
    assert {outcome.job.name: outcome.result for outcome in outcomes} == {"one": "one", "two": "two"}
    assert f"starts in process {one} on " in (tmp_path / "logs" / "one.log").read_text()


TORCH_FIRST = """
import sys
from pathlib import Path
import torch
from export.training.jobs import ProcessJob, run_jobs
if __name__ == "__main__":
    job = ProcessJob("one", torch.get_num_threads, ())
    run_jobs([job], logs=Path(sys.argv[1]), on_outcome=lambda outcome: print(torch.get_num_threads(), outcome.result))
"""


def test_a_job_has_one_thread_also_where_the_program_of_its_parent_imports_torch(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(TORCH_FIRST)
    assert answer(run([sys.executable, program, tmp_path], OMP_NUM_THREADS="2", MKL_NUM_THREADS="2")) == "2 1\n"


def test_a_failed_job_is_reported_and_leaves_the_others_alone(tmp_path, capsys):
    names = {"red": job_functions.fail, "dead": job_functions.end_itself, "early": job_functions.exit_early}
    jobs = [job(tmp_path, name, function) for name, function in names.items()]
    logs, errors = tmp_path / "logs", {}
    with pytest.raises(JobError, match=r"jobs: got 3 of 4 that failed: .*, expected all of them to finish\. Read"):
        run_jobs(
            [*jobs, job(tmp_path, "good")],
            logs=logs,
            workers=1,
            on_outcome=lambda outcome: errors.update({outcome.job.name: str(outcome.error or "")}),
        )
    assert (tmp_path / "good").exists()
    assert "got edge.errors.UsageError: colour: got 'blue', expected red. Paint it." in errors["red"]
    assert f"Read {logs / 'red.log'}, and give the same command again." in errors["red"]
    assert "job dead: got an end by SIGKILL, expected a result. Read" in errors["dead"]
    assert "job early: got an end with exit code 3" in errors["early"]
    assert errors["good"] == ""
    log = (logs / "red.log").read_text()
    assert "about to fail\nTraceback (most recent call last):" in log
    shown = capsys.readouterr().err
    assert "job red: got edge.errors.UsageError: colour" in shown
    assert "Traceback" not in shown


SLEEPING = """
import sys
from pathlib import Path
from export.training.jobs import ProcessJob, run_jobs
from tests.support.job_functions import sleep
place = Path(sys.argv[1])
jobs = [ProcessJob(name, sleep, (place / name, place / f"{name}.pid")) for name in ("one", "two", "three")]
run_jobs(jobs, logs=place / "logs", workers=2)
"""


def ended(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def wait_until(true):
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_the_processes_of_jobs_end_with_the_command(tmp_path, sent):
    files = [tmp_path / "one.pid", tmp_path / "two.pid"]
    command = [sys.executable, "-c", SLEEPING, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        process.send_signal(sent)
        process.wait(SECONDS)
        assert process.returncode == (-sent if sent == signal.SIGKILL else -signal.SIGINT)
    for file in files:
        wait_until(lambda file=file: ended(int(file.read_text())))
    assert not (tmp_path / "three.pid").exists()


def test_a_job_for_one_gpu_sees_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    call = pickle.dumps((job_functions.write_gpus, (tmp_path / "gpu",)))
    assert run_in_process(call, tmp_path / "log", threading.Event(), gpu=1) == (None, None)
    assert (tmp_path / "gpu").read_text() == "6"


@has_ray
@pytest.mark.filterwarnings("ignore")  # of ray itself
def test_jobs_run_on_a_local_ray_cluster(tmp_path):
    run_jobs(pair(tmp_path), logs=tmp_path / "logs", workers=2, ray="local")
    (one, threads), (two, _) = written(tmp_path, "one", "two")
    assert len({one, two, str(os.getpid())}) == 3
    assert threads == "1"
    with pytest.raises(JobError, match="1 of 1 that failed: red"):
        run_jobs([job(tmp_path, "red", job_functions.fail)], logs=tmp_path / "logs", ray="local")
    assert "colour: got 'blue'" in (tmp_path / "logs" / "red.log").read_text()


@has_ray
@pytest.mark.filterwarnings("ignore")
def test_clusters_that_cannot_run_the_jobs_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with closed_address() as closed:
        for address in (closed, f"ray://{closed}", "auto"):
            with pytest.raises(UsageError, match=f"--ray {address}: got .*, expected local, auto, or the address of"):
                run_jobs([job(tmp_path, "one")], logs=tmp_path / "logs", ray=address)
    with pytest.raises(UsageError, match="--ray local: got no GPU, expected one for each job"):
        run_jobs([job(tmp_path, "one")], logs=tmp_path / "logs", ray="local", gpu=True)
    assert not (tmp_path / "one").exists()


def test_a_node_of_another_version_or_without_the_files_is_refused(tmp_path):
    call, log = pickle.dumps((job_functions.write_process, (tmp_path / "one",))), tmp_path / "logs" / "one.log"
    result, reason = run_on_node(call, str(log), str(ROOT), "0.0.1")
    assert result is None
    assert re.match(rf"Fewheads {__version__} on node .*, and 0\.0\.1 here", reason)
    assert re.match(rf"no {log.parent} on node", run_on_node(call, str(log), str(ROOT), __version__)[1])
    assert not (tmp_path / "one").exists()
