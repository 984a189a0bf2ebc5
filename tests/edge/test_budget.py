"""Models that the memory has no room for are refused, with the numbers, and what is served is served still."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest

from edge.bundles.bundle import Bundle
from edge.errors import LoadFailed
from edge.instruments.memory import MemorySampler
from edge.pb import inference_pb2 as pb
from edge.repository.budget import MemoryBudget
from edge.repository.loader import Loader
from edge.runtimes.table import choose
from edge.scheduling.scheduler import Scheduler
from tests.support.models import write_oracle_bundle
from tests.support.server_processes import served
from tests.support.tiered_model import write_tiered_bundle

MIB = 1024**2
RUNTIME = choose("onnxruntime")


def machine(root: Path, available: int, limit: int | None = None, used: int = 0, files: int = 0) -> MemorySampler:
    """A machine with so much memory, and perhaps a limit on the control group of the process, all in bytes."""
    contents = {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {available // 1024} kB\n"}
    if limit is not None:
        group = "sys/fs/cgroup/system.slice"
        contents |= {
            "proc/1/cgroup": "1:name=systemd:/x\n0::/system.slice/fewheads.service\n",
            f"{group}/memory.max": "max\n",
            f"{group}/memory.current": "1\n",
            f"{group}/fewheads.service/memory.max": f"{limit}\n",
            f"{group}/fewheads.service/memory.current": f"{used}\n",
            f"{group}/fewheads.service/memory.stat": f"anon 5\ninactive_file {files}\nactive_file 7\n",
        }
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return MemorySampler(root, 1)


def needed(budget: MemoryBudget, bundle: Bundle) -> int:
    """Return the need of a bundle, in MiB, from the error of a budget without memory."""
    with pytest.raises(LoadFailed) as caught, budget.reserved(bundle, RUNTIME):
        pass
    return int(re.findall(r"([\d,]+) MiB (?:as|estimated) ", str(caught.value))[0].replace(",", ""))


def test_error_gives_all_numbers(tmp_path: Path) -> None:
    bundle = write_tiered_bundle(tmp_path / "tiered")
    budget = MemoryBudget(machine(tmp_path, 100 * MIB), 90 * MIB)
    with pytest.raises(LoadFailed) as caught, budget.reserved(bundle, RUNTIME):
        pass
    # Three tiers of a matrix of 4 MiB each, 2.3 times; one of them 0.8 times more while it is loaded.
    assert str(caught.value) == (
        "memory for tiered:1: got 100 MiB available (/proc/meminfo MemAvailable), expected 121 MiB: 31 MiB estimated "
        "from its files, and 90 MiB to be kept free. Unload another model, serve fewer tiers or instances, or "
        "lower --memory-headroom-bytes."
    )


def test_models_fit_up_to_the_sum(tmp_path: Path) -> None:
    bundle = write_tiered_bundle(tmp_path / "tiered")
    for headroom, fits in ((68 * MIB, True), (70 * MIB, False)):
        budget = MemoryBudget(machine(tmp_path, 100 * MIB), headroom)
        try:
            with budget.reserved(bundle, RUNTIME):
                assert fits
        except LoadFailed:
            assert not fits


def test_concurrent_runs_share_weights_but_no_tensors(tmp_path: Path) -> None:
    bundle, sampler = write_tiered_bundle(tmp_path / "tiered"), machine(tmp_path, 0)
    one, many = (needed(MemoryBudget(sampler, 0, instances), bundle) for instances in (1, 1 + 1024))
    # Four rows in, and one of an output of any number; both of 4 KiB.
    assert many - one == 1024 * 5 * 4 // 1024


def test_growth_of_an_earlier_load_replaces_the_estimate(tmp_path: Path) -> None:
    bundle, budget = write_tiered_bundle(tmp_path / "tiered"), MemoryBudget(machine(tmp_path, 0), 0)
    budget.learn(bundle, 100 * MIB)
    budget.learn(bundle, 5 * MIB)  # it took over what the other had left
    assert needed(budget, bundle) == 103


def test_concurrent_loads_are_counted(tmp_path: Path) -> None:
    bundle, budget = write_tiered_bundle(tmp_path / "tiered"), MemoryBudget(machine(tmp_path, 50 * MIB), 0)
    with (
        budget.reserved(bundle, RUNTIME),
        pytest.raises(LoadFailed, match="of which 31 MiB are for others that are being loaded"),
        budget.reserved(bundle, RUNTIME),
    ):
        pass
    with budget.reserved(bundle, RUNTIME):
        pass


@pytest.mark.parametrize(("limit", "used", "files", "left"), [(100, 90, 0, 10), (100, 90, 30, 40), (50, 90, 0, 0)])
def test_limit_of_the_control_group_counts(tmp_path: Path, limit: int, used: int, files: int, left: int) -> None:
    found = machine(tmp_path, 1000 * MIB, limit * MIB, used * MIB, files * MIB).available()
    assert found
    assert (found.size_bytes, found.source) == (left * MIB, "/sys/fs/cgroup memory.max")


def test_smaller_of_system_and_control_group_counts(tmp_path: Path) -> None:
    found = machine(tmp_path, 5 * MIB, 100 * MIB).available()
    assert found
    assert (found.kind, found.size_bytes) == ("system_available", 5 * MIB)


def test_nothing_is_rejected_where_memory_is_unknown(tmp_path: Path) -> None:
    bundle = write_tiered_bundle(tmp_path / "tiered")
    with MemoryBudget(MemorySampler(tmp_path / "none", 1), 2**60).reserved(bundle, RUNTIME):
        pass


@pytest.mark.slow
def test_loads_update_the_budget(tmp_path: Path) -> None:
    bundle = write_tiered_bundle(tmp_path / "tiered")
    sampler = machine(tmp_path, 2**40)
    budget, device = MemoryBudget(sampler, 0), Scheduler(1, device_bound=False)
    loader = Loader(device, "onnxruntime", tmp_path / "cache", budget=budget)
    model = loader.load_model(bundle)
    machine(tmp_path, 0)
    with pytest.raises(LoadFailed, match="as it took before"):
        loader.load_model(bundle)
    loader.close(model)
    device.close()


def test_model_without_room_is_rejected_and_others_stay(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    write_oracle_bundle(repository / "a", "oracle", 1)
    total = {reading.kind: reading.size_bytes for reading in MemorySampler().sample()}["system_total"]
    with served(repository, f"--memory-headroom-bytes={total}", "--model-control=explicit") as server:
        with pytest.raises(grpc.RpcError, match="memory for oracle:1: got ") as caught:
            server.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="oracle"))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        (model,) = server.stub.RepositoryIndex(pb.RepositoryIndexRequest()).models
        assert (model.state, "to be kept free" in model.reason) == ("UNAVAILABLE", True)
    with served(repository, f"--memory-headroom-bytes={total}") as server:
        assert "MiB to be kept free" in server.ready.unavailable["a"]
