"""More models than fit: requests load them, the least recently used leave, and no request is lost."""

import asyncio
import threading
import time
from collections import Counter, OrderedDict
from contextlib import asynccontextmanager, contextmanager

import numpy as np
import pytest
import tritonclient.grpc as triton
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from edge.client import Client, InferRequest
from edge.errors import DeadlineExceeded, ModelNotReady, NotFound, Overloaded
from edge.health.health import Health
from edge.instruments.memory import MemorySampler
from edge.launch import serving as serving_process
from edge.pb import inference_pb2 as pb
from edge.repository import loader
from edge.repository.budget import MemoryBudget
from edge.serving.metadata import Metadata
from edge.settings import TRANSPORTS
from tests.support.embedder_model import embeddings, write_embedder_bundle
from tests.support.http_requests import INFER
from tests.support.http_requests import ask as http_ask
from tests.support.in_process import running_service
from tests.support.letters_model import NAME as LETTERS
from tests.support.letters_model import (
    completion,
    continued,
    text_of,
    text_request,
    write_letters_bundle,
    write_letters_head,
)
from tests.support.metrics import page_of
from tests.support.models import ORACLE, serialized, write_oracle_bundle
from tests.support.sample_requests import column, good, triton_input
from tests.support.server_models import busy, failing_graph, write_bundle_of, write_busy_bundle

NAMES = "abcde"


def write(repository, names=NAMES):
    """Models that return the element at an index; each has elements of its own."""
    for name in names:
        index = np.array([1], np.int64)
        elements = np.arange(3) + 10 * ord(name)
        graph = failing_graph("element", elements)
        write_bundle_of(repository, name, serialized(graph), {"index": index}, {"element": elements[index]})


def request_to(name, index=2, **parameters):
    request = pb.ModelInferRequest(model_name=name)
    request.inputs.add(name="index", datatype="INT64", shape=[1])
    request.raw_input_contents.append(np.int64(index).tobytes())
    for key, value in parameters.items():
        request.parameters[key].int64_param = value
    return request


async def ask(running, name, index=2, deadline=None, **parameters):
    response = await running.infer(request_to(name, index, **parameters), deadline)
    assert response.model_name == name
    assert np.frombuffer(response.raw_output_contents[0], np.int64) == [10 * ord(name) + index]


def loaded(running):
    return {entry.name for entry in running.repository if entry.state in ("READY", "UNLOADING")}


def serving(directory, most, write=write, **options):
    return running_service(directory, write, mode="on-demand", max_loaded=most, **options)


@pytest.fixture
def loads(monkeypatch):
    """Count the loads by model; those whose name is in ``held`` wait."""

    class Loads(Counter):
        held = ""
        goes_on = threading.Event()

    counted, real = Loads(), loader.load_with

    def load_with(runtime, bundle, *rest):
        counted[bundle.manifest.name] += 1
        if bundle.manifest.name in counted.held:
            assert counted.goes_on.wait(20)
        return real(runtime, bundle, *rest)

    monkeypatch.setattr(loader, "load_with", load_with)
    yield counted
    counted.goes_on.set()


async def until(reached):
    for _ in range(2000):
        if reached():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it does not come to that")


async def ask_two(running, loads):
    """Return requests for ``a``, whose load has begun, and for ``b``, whose load waits for it."""
    first = asyncio.create_task(ask(running, "a"))
    await until(lambda: loads["a"])
    second = asyncio.create_task(ask(running, "b"))
    await until(lambda: running.repository.find("b", "").progress)
    return [first, second]


async def test_the_least_recently_used_model_is_evicted(tmp_path, loads):
    async with serving(tmp_path, 2, pinned=("e",)) as running:
        assert loaded(running) == {"e"}
        for name, expected in [("a", "ea"), ("b", "eb"), ("e", "eb"), ("a", "ea")]:
            await ask(running, name)
            assert loaded(running) == set(expected)
        assert loads == {"a": 2, "b": 1, "e": 1}
        a, b = (running.counted(name) for name in "ab")
        assert (a.success, a.loads, a.evictions) == (2, {"ready": 2}, 1)  # they survive
        assert (b.success, b.loads, b.evictions) == (1, {"ready": 1}, 1)
        assert a.load_ns > 0
        # The wait for the load is no part of another stage.
        assert a.stages["request"].total > a.load_ns > a.stages["compute_input"].total


@contextmanager
def never_more_than(running, most):
    sizes = []
    running.repository.on_change = lambda: sizes.append(len(loaded(running)))
    yield
    assert max(sizes, default=0) <= most


@given(
    most=st.integers(2, 4),
    pinned=st.sampled_from(["", "a"]),
    steps=st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4), max_size=7),
)
@settings(max_examples=12)
def test_random_requests(tmp_path_factory, most, pinned, steps):
    async def check():
        lru = OrderedDict.fromkeys(())
        async with serving(tmp_path_factory.mktemp("random"), most, pinned=tuple(pinned)) as running:
            with never_more_than(running, most):
                for names in steps:
                    await asyncio.gather(*(ask(running, name, number % 3) for number, name in enumerate(names)))
                    assert set(pinned) <= loaded(running)
                    if len(names) > 1:  # in any order
                        lru = None
                        continue
                    (name,) = names
                    if lru is not None and name != pinned:
                        lru[name] = None
                        lru.move_to_end(name)
                        while len(lru) > most - len(pinned):
                            lru.popitem(last=False)
                        assert loaded(running) == {*lru, *pinned}
                    assert name in loaded(running)
            asked = Counter(name for names in steps for name in names)
            assert {name: running.counted(name).success for name in asked} == asked
            for name in asked:
                totals = running.counted(name)
                assert totals.loads.get("ready", 0) - totals.evictions == (name in loaded(running))
                assert not totals.failures

    asyncio.run(check())


async def test_requests_share_a_load_and_can_leave_it(tmp_path, loads):
    loads.held = "a"
    async with serving(tmp_path, 1) as running:
        answered = [asyncio.create_task(ask(running, "a", number % 3)) for number in range(5)]
        gone, late = asyncio.create_task(ask(running, "a")), asyncio.create_task(ask(running, "a", timeout=20_000))
        early = asyncio.create_task(ask(running, "a", deadline=time.monotonic() + 0.02))
        await until(lambda: loads["a"])
        for task in (late, early):
            with pytest.raises(DeadlineExceeded):
                await task
        gone.cancel()
        await asyncio.wait([gone])
        entry = running.repository.find("a", "")
        assert (entry.state, entry.wanted) == ("LOADING", True)
        loads.goes_on.set()
        await asyncio.gather(*answered)
        assert loads["a"] == 1
        counted = running.counted("a")
        assert counted.failures == {"DeadlineExceeded": 2, "Cancelled": 1}
        assert counted.drops == {("DeadlineExceeded", "loading"): 2, ("Cancelled", "loading"): 1}
        assert running.service.threads._waiting == running.service.threads._bytes == 0
        assert await running.at_rest("a")


async def test_a_load_goes_on_alone_but_does_not_begin_so(tmp_path, loads):
    loads.held = "a"
    async with serving(tmp_path, 2) as running:
        tasks = await ask_two(running, loads)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        loads.goes_on.set()
        await until(lambda: running.repository.find("b", "").state == "UNAVAILABLE")
        assert (loaded(running), loads) == ({"a"}, {"a": 1})
        assert running.repository.find("b", "").reason == "not loaded"
        await ask(running, "b")


async def test_a_request_that_comes_as_a_load_is_given_up(tmp_path, loads):
    loads.held = "a"
    async with serving(tmp_path, 2) as running:
        first = asyncio.create_task(ask(running, "a"))
        await until(lambda: loads["a"])
        gone, entry = asyncio.create_task(ask(running, "b")), running.repository.find("b", "")
        await until(lambda: entry.progress)
        gone.cancel()
        await asyncio.wait([gone])
        asked = []

        async def ask_all_the_time():
            while entry.state != "READY":
                if entry.state == "UNAVAILABLE" or asked:
                    asked.append(asyncio.create_task(running.service._models.ready("b", "")))
                await asyncio.sleep(0)

        asking = [asyncio.create_task(ask_all_the_time()) for _ in range(2)]
        loads.goes_on.set()
        await asyncio.wait_for(asyncio.gather(first, *asking), 20)
        assert {found[0] for found in await asyncio.gather(*asked)} == {entry}
        assert loads["b"] == 1


async def test_a_version_that_is_listed_during_a_load_answers(tmp_path, loads):
    loads.held = "v"
    async with serving(tmp_path, 2, lambda to: write_oracle_bundle(to / "1", "v", 1)) as running:
        request = good()
        request.model_name = "v"
        asked = asyncio.create_task(running.infer(request))
        await until(lambda: loads["v"])
        write_oracle_bundle(running.directory / "2", "v", 2)
        await running.control.list_unloaded()
        loads.goes_on.set()
        assert (await asked).model_version == "2"


async def test_waiting_requests_count_in_the_limits_of_the_queue(tmp_path, loads):
    loads.held = "a"
    async with serving(tmp_path, 1) as running:
        running.scheduler.queue.max_jobs = 3
        waiting = [asyncio.create_task(ask(running, "a")) for _ in range(3)]
        await until(lambda: loads["a"])
        with pytest.raises(Overloaded, match="queue: got 3 waiting requests, expected fewer than 3"):
            await ask(running, "a")
        running.scheduler.queue.max_jobs, running.scheduler.queue.max_bytes = 9, running.service.threads._bytes + 20
        with pytest.raises(Overloaded, match=r"queue: got \d+ bytes with this request, expected at most \d+"):
            await ask(running, "a")
        loads.goes_on.set()
        await asyncio.gather(*waiting)
        assert running.counted("a").drops == {("Overloaded", "requests"): 1, ("Overloaded", "bytes"): 1}


async def test_a_bundle_that_cannot_be_loaded_is_not_tried_all_the_time(tmp_path):
    async with serving(tmp_path, 1) as running:
        model = running.directory / "a-1" / "model.onnx"
        sound = model.read_bytes()
        model.write_bytes(sound[:-1] + b"x")
        pauses = []
        for attempt in range(2):
            asked = [ask(running, "a") for _ in range(3)]
            for error in await asyncio.gather(*asked, ask(running, "a"), return_exceptions=True):
                assert isinstance(error, ModelNotReady)
                assert (error.subject, error.expected) == ("model 'a'", "a bundle that can be loaded")
                assert "sha256" in str(error.given)
            assert running.counted("a").loads == {"failed": attempt + 1}
            with pytest.raises(ModelNotReady, match=r"A request in \d\.\d s or later loads it again") as caught:
                await ask(running, "a")
            pauses.append(float(caught.value.fix.split()[3]))
            await ask(running, "b")  # the others are served
            running.repository.find("a", "")._pause_until = 0.0
        assert 0 <= pauses[0] <= 1 < pauses[1] <= 2
        model.write_bytes(sound)
        await ask(running, "a")
        assert running.counted("a").loads == {"failed": 2, "ready": 1}


async def test_a_model_in_use_answers_before_it_is_closed(tmp_path):
    def write_both(repository):
        write(repository, "a")
        write_busy_bundle(repository)

    async with serving(tmp_path, 1, write_both) as running:
        await running.infer(busy(20))  # long enough for a thread, not the event loop
        model = running.model("busy")
        running.repository.find("busy", "").loaded_at = 0.0  # it has stayed for long enough
        running_one, queued = (asyncio.create_task(running.infer(busy(500))) for _ in range(2))
        await until(lambda: model.use.users == 2)
        other = asyncio.create_task(ask(running, "a"))
        await until(lambda: running.repository.find("busy", "").state == "UNLOADING")
        back = asyncio.create_task(running.infer(busy(7)))  # waits for its next load
        assert not any(task.done() for task in (running_one, queued, other))
        for task, steps in ((running_one, 500), (queued, 500), (back, 7)):
            assert np.frombuffer((await task).raw_output_contents[0], np.int64) == [steps]
        await other
        assert running.counted("busy").failures == running.counted("a").failures == {}
        assert running.model("busy") is not model


async def test_refusal_where_nothing_can_be_evicted(tmp_path):
    async with serving(tmp_path, 1, pinned=("a",)) as running:
        with pytest.raises(Overloaded) as caught:
            await ask(running, "b")
        assert str(caught.value) == (
            "room for b:1: got 1 loaded models, none of which can be evicted, expected fewer than 1. Raise "
            "--max-loaded, or pin fewer models."
        )
        await ask(running, "a")
        assert running.counted("b").drops == {("Overloaded", "models"): 1}
        assert running.counted("b").loads == {}
        entry = running.repository.find("b", "")
        assert (entry.state, entry.wanted, entry.answers) == ("UNAVAILABLE", False, True)


@pytest.mark.parametrize(("pinned", "size"), [((), 1500), (("e",), 1500), ((), 500)])
async def test_models_are_evicted_for_memory(tmp_path, pinned, size):
    """Each model takes 1000 MiB, and 600 must stay free."""

    root, mib = tmp_path / "machine", 2**20
    (root / "proc").mkdir(parents=True)

    def measure():
        kilobytes = (size - 1000 * len(loaded(running))) * 1024
        (root / "proc" / "meminfo").write_text(f"MemAvailable: {kilobytes} kB\n")

    budget = MemoryBudget(MemorySampler(root, 1), 600 * mib)
    async with serving(tmp_path, None, pinned=pinned, budget=budget) as running:
        running.repository.on_change = measure
        measure()
        if pinned:
            with pytest.raises(Overloaded, match=r"memory for a:1: got 500 MiB.*No other model can be evicted"):
                await ask(running, "a")
            return
        if size < 600:  # what no eviction helps is not tried all the time
            for _ in range(2):
                with pytest.raises(ModelNotReady, match=r"memory for a:1: got 500 MiB.* or later loads it again"):
                    await ask(running, "a")
            assert running.counted("a").loads == {"failed": 1}
            return
        for name in "abab":
            await ask(running, name)
            assert loaded(running) == {name}
        assert running.counted("a").evictions == 2


@asynccontextmanager
async def heads(directory, most):
    def write_letters(repository):
        base = write_letters_bundle(repository / "base")
        write_letters_head(repository / "head", base, "head", 1)
        write(repository, "a")

    async with serving(directory, most, write_letters) as running:
        yield running, text_request("abc", head="head", max_tokens=3)


async def test_a_head_and_its_base_are_loaded_together(tmp_path):
    async with heads(tmp_path, 2) as (running, request):
        expected = continued("abc", 3, shift=1)
        for name in ("a", LETTERS, "head"):
            assert text_of(await running.infer(request)) == expected
            if name == "a":
                await ask(running, "a")
            else:
                await running.control.unload_model(name)
                await running.control.load_model(name)


async def test_a_base_is_not_evicted_for_its_head(tmp_path):
    async with heads(tmp_path, 1) as (running, request):
        with pytest.raises(Overloaded, match="room for head:1: got 1 loaded models, none of which can be evicted"):
            await running.infer(request)
        await ask(running, "a")


async def test_a_base_that_is_unloaded_while_a_request_waits_for_its_head(tmp_path):
    async with heads(tmp_path, 1) as (running, request):
        entry, _ = await running.service._models.ready(LETTERS, "")
        entry.loaded_at += 3600  # too short ago for an eviction
        other = asyncio.create_task(ask(running, "a"))
        await until(lambda: running.repository.find("a", "").progress == "waits until another model may be evicted")
        asked = asyncio.create_task(running.infer(request))
        while not running.control.room._kept:
            await asyncio.sleep(0)
        unloading = running.control.unload_model(LETTERS)
        outcomes = asyncio.gather(other, asked, unloading, return_exceptions=True)
        refused, also, unloaded = await asyncio.wait_for(outcomes, 20)
        assert isinstance(refused, Overloaded)
        assert isinstance(also, Overloaded)
        assert (unloaded, loaded(running)) == (None, set())


async def test_unloaded_models_are_described_truthfully(tmp_path):
    async with serving(tmp_path, 1, pinned=()) as running:
        health = Health(running.repository, running.scheduler.runs)
        models = running.service._models
        metadata = Metadata(running.repository, running.scheduler, health, models=models)
        health.accept()
        await ask(running, "a")
        await ask(running, "b")
        index = {
            entry.name: (entry.state, entry.reason)
            for entry in metadata.repository_index(pb.RepositoryIndexRequest()).models
        }
        assert index["a"] == ("UNAVAILABLE", "evicted for b:1; a request loads it again")
        assert index["b"] == ("READY", "")
        assert index["c"] == ("UNAVAILABLE", "not loaded")
        assert metadata.server_ready()
        for name in "abc":
            assert metadata.model_ready(pb.ModelReadyRequest(name=name))
            assert health.serving[name]
        assert loaded(running) == {"b"}  # none of this loads a model
        assert (await metadata.model_metadata(pb.ModelMetadataRequest(name="c"))).inputs[0].name == "index"
        assert loaded(running) == {"c"}
        await running.control.unload_model("a")
        assert not metadata.model_ready(pb.ModelReadyRequest(name="a"))
        with pytest.raises(NotFound, match="RepositoryModelLoad loads it"):
            await ask(running, "a")
        await running.control.load_model("a")
        assert loaded(running) == {"a"}
        await ask(running, "b")
        await ask(running, "a")
        assert not health.problems()


async def test_the_highest_version_answers_until_it_fails(tmp_path):
    def write_versions(repository):
        for version in (1, 2):
            write_oracle_bundle(repository / str(version), "v", version)
        (repository / "2" / "model.onnx").write_bytes(b"broken")
        write_oracle_bundle(repository / "3", "w", 1)

    async with serving(tmp_path, 1, write_versions) as running:
        assert running.repository.find("v", "").version == "2"
        assert (await running.service._models.ready("v", ""))[0].version == "1"
        write_oracle_bundle(running.directory / "2", "v", 2, replace=True)
        with pytest.raises(ModelNotReady):
            await running.service._models.ready("v", "2")  # in its pause
        await running.control.load_model("v")  # both versions, one after the other
        assert [entry.version for entry in running.repository.named("v") if entry.model] == ["2"]


async def test_a_version_leaves_while_the_load_of_another_one_waits(tmp_path):
    def write_versions(repository):
        write(repository, "a")
        for version in (1, 2):
            write_oracle_bundle(repository / str(version), "v", version)

    async with serving(tmp_path, 1, write_versions) as running:
        entry, _ = await running.service._models.ready("v", "1")
        entry.loaded_at += 3600  # too short ago for an eviction
        other = asyncio.create_task(ask(running, "a"))
        await until(lambda: running.repository.find("a", "").progress == "waits until another model may be evicted")
        second = asyncio.create_task(running.service._models.ready("v", "2"))
        await until(lambda: running.repository.find("v", "2").progress == "waits for the load of another model")
        assert entry.state == "READY"
        entry.loaded_at -= 3600
        await asyncio.wait_for(asyncio.gather(other, second), 20)
        assert running.counted("v").loads == {"ready": 1}


async def test_shutdown_during_a_load(tmp_path, loads):
    loads.held = "a"
    async with serving(tmp_path, 2) as running:
        asked = await ask_two(running, loads)
        running.control.stop()
        loads.goes_on.set()
        first, second = await asyncio.gather(*asked, return_exceptions=True)
        assert first is None  # its load has ended in time
        assert isinstance(second, ModelNotReady)
        with pytest.raises(ModelNotReady, match="server: got a server that is shutting down"):
            await ask(running, "c")
        assert loads == {"a": 1}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_waits_for_models(tmp_path, transport):
    repository = tmp_path / "repository"
    write_oracle_bundle(repository / "oracle")
    write_letters_bundle(repository / "letters")
    write_embedder_bundle(repository / "embedder")
    write(repository, "a")
    options = ("--model-control=on-demand", "--max-loaded=2", "--pin=a", "--http-port=0", f"--transport={transport}")
    with (
        serving_process(repository, cache=tmp_path, arguments=options) as ready,
        triton.InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client,
        Client(f"127.0.0.1:{ready.grpc_port}") as ours,
    ):
        assert (ready.ready, ready.on_demand) == (("a:1",), (f"{ORACLE}:1", "embedder:1", f"{LETTERS}:1"))
        http = f"127.0.0.1:{ready.http_port}"
        expression, prompt = {"expression": column("3 + 4")}, {"prompt": column("abc")}

        def is_loaded():
            return [m.name for m in client.get_model_repository_index().models if m.state == "READY" and m.name != "a"]

        assert is_loaded() == []
        for _ in range(2):
            result = client.infer(ORACLE, [triton_input("expression", column("3 + 4"))])
            assert result.as_numpy("value").tolist() == [[7]]
            listed = {model["id"]: model["capabilities"] for model in http_ask(http, "/v1/models").json["data"]}
            assert listed == {"embedder": ["embeddings"], LETTERS: ["completions"]}
            assert is_loaded() == [ORACLE]
            completed = http_ask(http, "/v1/completions", completion(prompt="abc", max_tokens=3))
            assert completed.json["choices"][0]["text"] == continued("abc", 3)
            embedded = http_ask(http, "/embed", {"inputs": ["good"]})  # by the only model that can
            assert embedded.json == embeddings(["good"]).tolist()
            body = {"inputs": [{"name": "expression", "datatype": "BYTES", "shape": [1, 1], "data": ["3 + 4"]}]}
            assert http_ask(http, INFER, body).json["outputs"][0]["data"] == [7]
            assert client.is_model_ready(LETTERS)
            assert http_ask(http, f"/v2/models/{LETTERS}/config").json["name"] == LETTERS
            assert is_loaded() == [LETTERS]
            requests = [InferRequest(ORACLE, expression), InferRequest(LETTERS, prompt, max_tokens=3)] * 3
            for number, answer in enumerate(ours.infer_stream(iter(requests))):
                if number % 2:
                    assert answer.outputs["text"].tolist() == [[continued("abc", 3).encode()]]
                else:
                    assert answer.outputs["value"].tolist() == [[7]]
        assert client.is_server_ready()
        families = text_string_to_metric_families(page_of(ready))
        samples = {
            (it.name, it.labels["model"]): it.value for of in families for it in of.samples if "model" in it.labels
        }
        for name in (ORACLE, LETTERS):
            loads, evictions, answers = (
                samples[f"fewheads_model_{metric}", name] for metric in ("loads_total", "evictions_total", "ready")
            )
            assert (loads - evictions, answers) == (name in is_loaded(), 1)
            assert evictions >= 2
        # As Triton's users expect, a model that was unloaded answers no request until it is loaded again.
        client.unload_model(ORACLE)
        assert not client.is_model_ready(ORACLE)
        with pytest.raises(InferenceServerException, match="one that is not loaded"):
            client.infer(ORACLE, [triton_input("expression", column("3 + 4"))])
        assert http_ask(http, INFER, body).status == 404
        client.load_model(ORACLE)
        assert is_loaded() == [ORACLE]
