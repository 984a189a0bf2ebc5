"""Broken bundles in place of a model: the loaded model goes on serving under load."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from tests.support.metrics import wait_until
from tests.support.model_control import NAME, READY, damage, explicit, is_healthy, served, states
from tests.support.models import DATA, write_oracle_bundle
from tests.support.traffic import Traffic, traffic


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_oracle_bundle(tmp_path / "repository" / "a", NAME, 1).path.parent


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def wrong_golden(bundle: Path) -> None:
    """Everything is as recorded, but the model computes something else."""
    shutil.rmtree(bundle)
    shutil.copytree(DATA / "broken_bundles" / "golden-wrong", bundle)
    text = (bundle / "manifest.json").read_text()
    (bundle / "manifest.json").write_text(text.replace('"calculator-oracle"', f'"{NAME}"'))


#: Each corruption, and the part of the bundle that the error names.
CORRUPTIONS: list[tuple[Callable[[Path], object], str]] = [
    (lambda bundle: truncate(bundle / "model.onnx"), r"model\.onnx"),
    (damage, "sha256"),
    (lambda bundle: (bundle / "model.onnx").unlink(), r"model\.onnx"),
    (lambda bundle: link(bundle / "model.onnx"), "a symbolic link"),
    (lambda bundle: truncate(bundle / "manifest.json"), "manifest"),
    (lambda bundle: (bundle / "manifest.json").write_text(""), "manifest"),
    (wrong_golden, "got a largest"),
]


def goes_on(sent: Traffic) -> bool:
    before = len(sent.answers)
    return wait_until(lambda: len(sent.answers) > before + 4)


def test_failed_reloads_leave_the_model_serving(repository: Path) -> None:
    with (
        explicit(repository, "--load-model=*") as (ready, client),
        traffic(f"127.0.0.1:{ready.grpc_port}", NAME, threads=4) as sent,
    ):
        for corrupt, message in CORRUPTIONS:
            write_oracle_bundle(repository / "a", NAME, 1, replace=True)
            corrupt(repository / "a")
            with pytest.raises(InferenceServerException, match=message) as caught:
                client.load_model(NAME)
            assert caught.value.status() == "StatusCode.FAILED_PRECONDITION"
            ((state, reason),) = states(client).values()
            assert (state, "got " in reason) == (READY, True)
            assert is_healthy(ready)
            assert client.is_server_ready()
            assert goes_on(sent)
        assert set(sent.versions()) == {"1"}
        write_oracle_bundle(repository / "a", NAME, 2, replace=True)
        client.load_model(NAME)
        assert states(client) == {(NAME, "2"): (READY, "")}
        assert wait_until(lambda: sent.versions()[-4:] == ["2"] * 4)
    assert (set(sent.versions()), sent.failures) == ({"1", "2"}, [])


@pytest.mark.parametrize(
    "corrupt",
    [lambda bundle: truncate(bundle / "model.onnx"), pytest.param(wrong_golden, marks=pytest.mark.slow)],
    ids=["truncated", "golden"],
)
def test_poll_does_not_follow_broken_bundles(repository: Path, corrupt: Callable[[Path], object]) -> None:
    """An interrupted copy, where the server follows its repository."""
    with (
        served(repository, "--model-control=poll", "--poll-seconds=0.1") as (ready, client),
        traffic(f"127.0.0.1:{ready.grpc_port}", NAME, threads=4) as sent,
    ):
        corrupt(repository / "a")
        assert wait_until(lambda: any("got " in reason for _, reason in states(client).values()))
        assert goes_on(sent)
        assert [state for state, _ in states(client).values()][-1] == READY
        assert set(sent.versions()) == {"1"}
        write_oracle_bundle(repository / "a", NAME, 2, replace=True)
        assert wait_until(lambda: sent.versions()[-4:] == ["2"] * 4)
    assert (set(sent.versions()), sent.failures) == ({"1", "2"}, [])
