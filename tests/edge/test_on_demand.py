"""More models than fit: requests load them, the least recently used leave, and no request is lost."""

import asyncio
import time
from collections import Counter, OrderedDict
from contextlib import contextmanager

import pytest
import tritonclient.grpc as triton
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from edge.client import Client, InferRequest
from edge.errors import DeadlineExceeded, ModelNotReady, NotFound
from edge.health.health import Health
from edge.launch import serving as serving_process
from edge.pb import inference_pb2 as pb
from edge.serving.metadata import Metadata
from edge.settings import TRANSPORTS
from tests.support.embedder_model import embeddings, write_embedder_bundle
from tests.support.http_requests import INFER
from tests.support.http_requests import ask as http_ask
from tests.support.letters_model import NAME as LETTERS
from tests.support.letters_model import completion, continued, write_letters_bundle
from tests.support.metrics import page_of, reached
from tests.support.models import ORACLE, write_oracle_bundle
from tests.support.on_demand_models import NAMES, ask, loaded, serving, write, write_versions
from tests.support.sample_requests import column, good, triton_input


async def ask_two(running, loads):
    """Return requests for ``a``, whose load has begun, and for ``b``, whose load waits for it."""
    first = asyncio.create_task(ask(running, "a"))
    await reached(lambda: loads["a"])
    second = asyncio.create_task(ask(running, "b"))
    await reached(lambda: running.repository.find("b", "").progress)
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
        await reached(lambda: loads["a"])
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
        assert running.scheduler.queue.held_jobs == running.scheduler.queue.held_bytes == 0
        assert await running.at_rest("a")


async def test_a_load_goes_on_alone_but_does_not_begin_so(tmp_path, loads):
    loads.held = "a"
    async with serving(tmp_path, 2) as running:
        tasks = await ask_two(running, loads)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        loads.goes_on.set()
        await reached(lambda: running.repository.find("b", "").state == "UNAVAILABLE")
        assert (loaded(running), loads) == ({"a"}, {"a": 1})
        assert running.repository.find("b", "").reason == "not loaded"
        await ask(running, "b")


async def test_a_request_that_comes_as_a_load_is_given_up(tmp_path, loads):
    loads.held = "a"
    async with serving(tmp_path, 2) as running:
        first = asyncio.create_task(ask(running, "a"))
        await reached(lambda: loads["a"])
        gone, entry = asyncio.create_task(ask(running, "b")), running.repository.find("b", "")
        await reached(lambda: entry.progress)
        gone.cancel()
        await asyncio.wait([gone])
        asked = []

        async def ask_all_the_time():
            while entry.state != "READY":
                if entry.state == "UNAVAILABLE" or asked:
                    asked.append(asyncio.create_task(running.service.load_waits._models.ready("b", "")))
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
        await reached(lambda: loads["v"])
        write_oracle_bundle(running.directory / "2", "v", 2)
        await running.control.list_unloaded()
        loads.goes_on.set()
        assert (await asked).model_version == "2"


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
            assert loaded(running) == set("b" * attempt)  # which is not evicted for it
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


async def test_unloaded_models_are_described_truthfully(tmp_path):
    async with serving(tmp_path, 1, pinned=()) as running:
        health = Health(running.repository, running.scheduler.runs)
        metadata = Metadata(running.repository, running.scheduler, health, service=running.service)
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
    def write_all(repository):
        write_versions(repository)
        (repository / "2" / "model.onnx").write_bytes(b"broken")
        write_oracle_bundle(repository / "3", "w", 1)

    async with serving(tmp_path, 1, write_all) as running:
        assert running.repository.find("v", "").version == "2"
        assert (await running.service.load_waits._models.ready("v", ""))[0].version == "1"
        write_oracle_bundle(running.directory / "2", "v", 2, replace=True)
        with pytest.raises(ModelNotReady):
            await running.service.load_waits._models.ready("v", "2")  # in its pause
        await running.control.load_model("v")  # both versions, one after the other
        assert [entry.version for entry in running.repository.named("v") if entry.model] == ["2"]


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
