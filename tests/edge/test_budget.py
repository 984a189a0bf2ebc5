"""The memory budget: what a model needs, what stays free, and models that do not fit."""

import re
from contextlib import suppress
from dataclasses import replace

import grpc
import msgspec
import pytest

from edge.errors import LoadFailed
from edge.instruments.memory import MemorySampler
from edge.pb import inference_pb2 as pb
from edge.repository.budget import MemoryBudget
from edge.repository.loader import Loader
from edge.runtimes.table import choose
from edge.runtimes.tensorrt.runtime import TensorRt
from edge.scheduling.admission import CacheBudget
from edge.scheduling.scheduler import Scheduler
from tests.support.letters_model import write_letters_bundle
from tests.support.models import write_oracle_bundle
from tests.support.server_models import write_tiered_bundle
from tests.support.server_processes import served

MIB = 1024**2
RUNTIME = choose("onnxruntime")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_tiered_bundle(tmp_path_factory.mktemp("tiered") / "tiered")


def machine(root, available, limit=None, used=0, files=0):
    """A machine with so many MiB of memory, and perhaps a limit on the control group of the process."""
    contents = {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {available * 1024} kB\n"}
    if limit is not None:
        group = "sys/fs/cgroup/system.slice"
        contents |= {
            "proc/1/cgroup": "1:name=systemd:/x\n0::/system.slice/fewheads.service\n",
            f"{group}/memory.max": "max\n",
            f"{group}/memory.current": "1\n",
            f"{group}/fewheads.service/memory.max": f"{limit * MIB}\n",
            f"{group}/fewheads.service/memory.current": f"{used * MIB}\n",
            f"{group}/fewheads.service/memory.stat": f"anon 5\ninactive_file {files * MIB}\nactive_file 7\n",
        }
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return MemorySampler(root, 1)


def rejection(budget, bundle, runtime=RUNTIME):
    with pytest.raises(LoadFailed) as caught, budget.reserved(bundle, runtime):
        pass
    return str(caught.value)


def needed(budget, bundle, runtime=RUNTIME):
    """The MiB that a budget without any memory says that a bundle needs."""
    return int(re.findall(r"([\d,]+) MiB (?:as|estimated) ", rejection(budget, bundle, runtime))[0].replace(",", ""))


def test_rejection_gives_all_numbers(tmp_path, bundle):
    # Three tiers of a matrix of 4 MiB each, 2.3 times; one of them 0.8 times more while it is loaded.
    assert rejection(MemoryBudget(machine(tmp_path, 100), 90 * MIB), bundle) == (
        "memory for tiered:1: got 100 MiB available (/proc/meminfo MemAvailable), expected 121 MiB: 31 MiB estimated "
        "from its files, and 90 MiB to be kept free. Unload another model, serve fewer tiers or instances, or "
        "lower --memory-headroom-bytes."
    )
    assert "expected 101 MiB" in rejection(MemoryBudget(machine(tmp_path, 100), 70 * MIB), bundle)
    for fitting in (
        MemoryBudget(machine(tmp_path, 100), 68 * MIB),
        MemoryBudget(MemorySampler(tmp_path / "none", 1), 2**60),  # where nothing can be read
    ):
        with fitting.reserved(bundle, RUNTIME):
            pass


def test_runs_at_once_share_the_weights_and_no_tensors(tmp_path, bundle):
    one, many = (needed(MemoryBudget(machine(tmp_path, 0), 0, instances), bundle) for instances in (1, 1 + 1024))
    # Four rows in, and one of an output of any number; both of 4 KiB.
    assert many - one == 1024 * 5 * 4 // 1024


def test_every_file_in_tensorrt_has_buffers_of_two_runs_on_host_and_device(tmp_path, bundle):
    def with_rows(rows):  # of 4 KiB
        (name, profile), *_ = bundle.manifest.profile.items()
        profiles = {name: msgspec.structs.replace(profile, max=(rows, *profile.max[1:]))}
        return replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, profile=profiles))

    budget, few, many = MemoryBudget(machine(tmp_path, 0), 0), with_rows(1), with_rows(1 + 1024)
    for runtime, times in ((RUNTIME, 1), (TensorRt(), 3 * 2 * 2)):
        assert needed(budget, many, runtime) - needed(budget, few, runtime) == 4 * times


def test_most_memory_of_earlier_loads_is_expected_again(tmp_path, bundle):
    budget = MemoryBudget(machine(tmp_path, 0), 0)
    budget.learn(bundle, 100 * MIB)
    budget.learn(bundle, 5 * MIB)  # it took over memory that the other had left
    assert needed(budget, bundle) == 103


def test_concurrent_loads_share_the_memory(tmp_path, bundle):
    budget = MemoryBudget(machine(tmp_path, 50), 0)
    with budget.reserved(bundle, RUNTIME):
        assert "of which 31 MiB are for others that are being loaded" in rejection(budget, bundle)
    with budget.reserved(bundle, RUNTIME):
        pass


def test_room_for_keys_and_values_stays_free_while_a_model_generates_text(tmp_path, bundle):
    letters, cache = write_letters_bundle(tmp_path / "letters"), CacheBudget(80 * MIB)
    budget = MemoryBudget(machine(tmp_path, 100), 0, cache=cache)
    with budget.reserved(bundle, RUNTIME):
        pass
    with suppress(ZeroDivisionError), budget.reserved(letters, RUNTIME):
        raise ZeroDivisionError
    with budget.reserved(bundle, RUNTIME):  # the other one is not loaded
        pass
    with budget.reserved(letters, RUNTIME), budget.reserved(letters, RUNTIME):  # the room is kept once
        pass
    assert rejection(budget, bundle).endswith(
        "expected 111 MiB: 31 MiB estimated from its files, 80 MiB for keys and values, and 0 MiB to be kept free. "
        "Unload another model, serve fewer tiers or instances, or lower --memory-headroom-bytes or --cache-mib."
    )
    budget.closed(letters.manifest)
    rejection(budget, bundle)
    reserved = cache.reserve("letters", 20 * MIB)
    with budget.reserved(bundle, RUNTIME):
        pass
    reserved.give_back()
    budget.closed(letters.manifest)
    with budget.reserved(bundle, RUNTIME):
        pass


def test_lower_of_the_system_and_the_control_group_counts(tmp_path):
    for available, group, left, source in (
        (1000, (100, 90, 30), 40, "/sys/fs/cgroup memory.max"),
        (1000, (50, 90, 0), 0, "/sys/fs/cgroup memory.max"),
        (5, (100, 0, 0), 5, "/proc/meminfo MemAvailable"),
    ):
        found = machine(tmp_path, available, *group).available()
        assert (found.size_bytes, found.source) == (left * MIB, source)


@pytest.mark.slow
def test_load_teaches_the_budget(tmp_path, bundle):
    budget, device = MemoryBudget(machine(tmp_path, 2**20), 0), Scheduler(1, device_bound=False)
    loader = Loader(device, "onnxruntime", tmp_path / "cache", budget=budget)
    model = loader.load_model(bundle)
    machine(tmp_path, 0)
    with pytest.raises(LoadFailed, match="as it took before"):
        loader.load_model(bundle)
    loader.close(model)
    device.close()


def test_server_without_room_reports_it_and_keeps_its_models(tmp_path):
    repository = write_oracle_bundle(tmp_path / "repository" / "a", "oracle", 1).path.parent
    total = {reading.kind: reading.size_bytes for reading in MemorySampler().sample()}["system_total"]
    with served(repository, f"--memory-headroom-bytes={total}", "--model-control=explicit") as server:
        with pytest.raises(grpc.RpcError, match="memory for oracle:1: got ") as caught:
            server.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="oracle"))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        (model,) = server.stub.RepositoryIndex(pb.RepositoryIndexRequest()).models
        assert (model.state, "to be kept free" in model.reason) == ("UNAVAILABLE", True)
