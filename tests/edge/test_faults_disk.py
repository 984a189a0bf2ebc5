"""Full and read-only disks, and interrupted builds: the server serves what it can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest

from edge.pb import inference_pb2 as pb
from tests.support.busy_model import busy
from tests.support.commands import Done, answer, fewheads, refusal
from tests.support.full_disk import can_mount
from tests.support.server_models import write_busy_bundle
from tests.support.server_processes import Served, served

ROOT = Path(__file__).parents[2]
mounting = pytest.mark.skipif(not can_mount("/tmp"), reason="needs mounts of a user's own")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_busy_bundle(tmp_path / "repository").path.parent


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    (tmp_path / "builds").mkdir()
    return tmp_path / "builds"


def build(repository: Path, cache: Path, *before: object, **variables: str) -> Done[str]:
    """Run ``fewheads build``; ``before`` are arguments of :mod:`tests.support.full_disk`."""
    arguments = ["build", repository / "busy-1", "--target=onnxruntime", f"--cache={cache}", "--json"]
    if not before:
        return fewheads(*arguments, **variables)
    command = [sys.executable, "-m", "tests.support.full_disk", *map(str, before), *map(str, arguments)]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60, env=environment)


def is_served(server: Served) -> bool:
    response = server.stub.ModelInfer(busy(3), timeout=10)
    return bool(response.raw_output_contents[0] == np.int64(3).tobytes())


def log_of(repository: Path, cache: Path, program: str = "edge") -> str:
    """Return the log of a server that serves the model and exits with 0."""
    with served(repository, f"--cache={cache}", program=program) as server:
        assert is_served(server)
        os.kill(server.ready.process_id, signal.SIGTERM)
        code, log = server.end()
    assert code == 0
    return log


def test_server_that_can_write_nothing_serves(repository: Path) -> None:
    """It can write neither a file nor a line of its debug log."""
    program = f"tests.support.full_disk no-room {repository}"
    with served(repository, "--model-control=explicit", "--load-model=*", "--log-level=debug", program=program) as one:
        assert is_served(one)
        with pytest.raises(grpc.RpcError) as caught:
            one.stub.ModelInfer(pb.ModelInferRequest(model_name="zz"), timeout=10)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        one.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="busy"), timeout=20)
        assert is_served(one)
        os.kill(one.ready.process_id, signal.SIGTERM)
        assert one.end() == (0, "")


@pytest.mark.slow
@mounting
def test_read_only_cache_is_used_and_not_written(repository: Path, cache: Path) -> None:
    line = refusal(build(repository, cache, "read-only", cache), 2)
    assert "Read-only file system" in line
    program = f"tests.support.full_disk read-only {cache}"
    assert "was read from the bundle" in log_of(repository, cache, program)
    answer(build(repository, cache))
    assert "was read from the cache" in log_of(repository, cache, program)
