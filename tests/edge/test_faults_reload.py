"""What is put in place of a model and is none: the model that is there serves on, however many ask meanwhile."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.support.metrics import wait_until
from tests.support.model_control import NAME, READY, ask, damage, explicit, is_healthy, served, states
from tests.support.models import DATA, write_oracle_bundle

ASKERS = 3


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "repository").mkdir()
    write_oracle_bundle(tmp_path / "repository" / "a", NAME, 1)
    return tmp_path / "repository"


def truncate(bundle: Path) -> None:
    data = (bundle / "model.onnx").read_bytes()
    (bundle / "model.onnx").write_bytes(data[: len(data) // 2])


def lose(bundle: Path) -> None:
    (bundle / "model.onnx").unlink()


def link(bundle: Path) -> None:
    (bundle / "model.onnx").unlink()
    (bundle / "model.onnx").symlink_to("/etc/passwd")


def cut_manifest(bundle: Path) -> None:
    text = (bundle / "manifest.json").read_text()
    (bundle / "manifest.json").write_text(text[: len(text) // 2])


def empty_manifest(bundle: Path) -> None:
    (bundle / "manifest.json").write_text("")


def wrong_hash(bundle: Path) -> None:
    """The files are whole, and the manifest speaks of others."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["files"]["model.onnx"]["sha256"] = "0" * 64
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def wrong_golden(bundle: Path) -> None:
    """Everything is as recorded, and computes something else."""
    shutil.rmtree(bundle)
    shutil.copytree(DATA / "broken_bundles" / "golden-wrong", bundle)
    text = (bundle / "manifest.json").read_text()
    (bundle / "manifest.json").write_text(text.replace('"calculator-oracle"', f'"{NAME}"'))


#: Each way, and what the refusal speaks of.
CORRUPTIONS: dict[Callable[[Path], None], str] = {
    truncate: r"model\.onnx",
    damage: "sha256",
    lose: r"model\.onnx",
    link: "a symbolic link",
    cut_manifest: "manifest",
    empty_manifest: "manifest",
    wrong_hash: "sha256",
    wrong_golden: "largest difference",
}


@contextmanager
def asking(url: str) -> Iterator[list[str]]:
    """Ask on several connections while the block runs; the versions that answered, or what was wrong with one."""
    versions: list[str] = []
    stop = threading.Event()

    def answer(client: triton.InferenceServerClient) -> str:
        try:
            return ask(client)
        except (InferenceServerException, AssertionError) as error:
            return repr(error)

    def keep_asking() -> None:
        with triton.InferenceServerClient(url) as client:
            while not stop.is_set():
                versions.append(answer(client))

    threads = [threading.Thread(target=keep_asking) for _ in range(ASKERS)]
    for thread in threads:
        thread.start()
    try:
        assert wait_until(lambda: len(versions) > ASKERS)
        yield versions
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_corrupt_reloads_under_load(repository: Path) -> None:
    with explicit(repository, "--load-model=*") as (ready, client), asking(f"127.0.0.1:{ready.grpc_port}") as versions:
        for corrupt, told in CORRUPTIONS.items():
            write_oracle_bundle(repository / "a", NAME, 1, replace=True)
            corrupt(repository / "a")
            answered = len(versions)
            with pytest.raises(InferenceServerException, match=told) as caught:
                client.load_model(NAME)
            assert caught.value.status() == "StatusCode.FAILED_PRECONDITION"
            assert [state for state, _ in states(client).values()] == [READY]
            assert is_healthy(ready)
            assert wait_until(lambda answered=answered: len(versions) > answered + ASKERS)  # type: ignore[misc]
        assert set(versions) == {"1"}
        write_oracle_bundle(repository / "a", NAME, 2, replace=True)
        client.load_model(NAME)
        assert wait_until(lambda: versions[-ASKERS:] == ["2"] * ASKERS)
    assert set(versions) == {"1", "2"}


@pytest.mark.parametrize("corrupt", [truncate, pytest.param(wrong_golden, marks=pytest.mark.slow)])
def test_what_appears_broken_is_not_followed(repository: Path, corrupt: Callable[[Path], None]) -> None:
    """As a copy does that breaks off, where the server follows its repository by itself."""
    arguments = ["--model-control=poll", "--poll-seconds=0.1"]
    with served(repository, *arguments) as (ready, client), asking(f"127.0.0.1:{ready.grpc_port}") as versions:
        corrupt(repository / "a")
        assert wait_until(lambda: any("got " in reason for _, reason in states(client).values()))
        answered = len(versions)
        assert wait_until(lambda: len(versions) > answered + ASKERS)
        assert [state for state, _ in states(client).values()][-1] == READY
        assert set(versions) == {"1"}
        write_oracle_bundle(repository / "a", NAME, 2, replace=True)
        assert wait_until(lambda: versions[-ASKERS:] == ["2"] * ASKERS)
    assert set(versions) == {"1", "2"}
