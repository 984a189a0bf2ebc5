"""Room for models: which one leaves, when, for which other one, and what is refused where none can."""

import asyncio
import shutil

import numpy as np
import pytest

from edge.bundles.bundle import Bundle
from edge.errors import BackendError, LoadFailed, ModelNotReady, NotFound, Overloaded
from edge.instruments.memory import MemorySampler
from edge.repository import load as repository_load
from edge.repository.budget import MemoryBudget
from edge.repository.load import Load
from edge.runtimes import table
from edge.runtimes.onnxruntime import OnnxRuntimeCpu
from tests.support.boards import write as write_files
from tests.support.letters_model import NAME as LETTERS
from tests.support.letters_model import continued, text_of
from tests.support.metrics import reached
from tests.support.models import write_oracle_bundle
from tests.support.on_demand_models import ask, heads, loaded, serving, write, write_versions
from tests.support.server_models import busy, write_busy_bundle


async def test_refusal_where_nothing_can_be_evicted(tmp_path):
    async with serving(tmp_path, 1, pinned=("a",)) as running:
        with pytest.raises(Overloaded) as caught:
            await ask(running, "b")
        assert str(caught.value) == (
            "room for b:1: got loaded models of which none can be evicted, expected one that can, or fewer than 1. "
            "Raise --max-loaded, or pin fewer models."
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

    def measure():
        kilobytes = (size - 1000 * len(loaded(running))) * 1024
        write_files(root, {"proc/meminfo": f"MemAvailable: {kilobytes} kB\n"})

    budget = MemoryBudget(MemorySampler(root, 1), 600 * mib)
    async with serving(tmp_path, None, pinned=pinned, budget=budget) as running:
        running.repository.on_change = measure
        measure()
        if pinned or size < 600:  # what no eviction helps is not tried all the time
            for _ in range(2):
                with pytest.raises(ModelNotReady, match=r"memory for a:1: got 500 MiB.* or later loads it again"):
                    await ask(running, "a")
            assert running.counted("a").loads == {"failed": 1}
            return
        for name in "abab":
            await ask(running, name)
            assert loaded(running) == {name}
        assert running.counted("a").evictions == 2


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
        for _ in range(2):  # without the base, and with it
            with pytest.raises(Overloaded, match="room for head:1: got loaded models of which none can be evicted"):
                await running.infer(request)
        assert running.counted(LETTERS).drops == {("Overloaded", "models"): 2}  # the model that was asked, not its head
        assert not running.counted("head").failures
        await ask(running, "a")


async def test_a_base_that_is_unloaded_while_a_request_waits_for_its_head(tmp_path):
    async with heads(tmp_path, 1) as (running, request):
        entry, _ = await running.service.load_waits._models.ready(LETTERS, "")
        entry.loaded_at += 3600  # too short ago for an eviction
        other = asyncio.create_task(ask(running, "a"))
        await reached(lambda: running.repository.find("a", "").progress == "waits until another model may be evicted")
        asked = asyncio.create_task(running.infer(request))
        while not running.control.room._kept:
            await asyncio.sleep(0)
        unloading = running.control.unload_model(LETTERS)
        outcomes = asyncio.gather(other, asked, unloading, return_exceptions=True)
        refused, also, unloaded = await asyncio.wait_for(outcomes, 20)
        assert isinstance(refused, Overloaded)
        assert isinstance(also, Overloaded)
        assert (unloaded, loaded(running)) == (None, set())


async def test_a_version_leaves_while_the_load_of_another_one_waits(tmp_path):
    async with serving(tmp_path, 1, lambda to: (write(to, "a"), write_versions(to))) as running:
        entry, _ = await running.service.load_waits._models.ready("v", "1")
        entry.loaded_at += 3600  # too short ago for an eviction
        other = asyncio.create_task(ask(running, "a"))
        await reached(lambda: running.repository.find("a", "").progress == "waits until another model may be evicted")
        second = asyncio.create_task(running.service.load_waits._models.ready("v", "2"))
        await reached(lambda: running.repository.find("v", "2").progress == "waits for the load of another model")
        assert entry.state == "READY"
        entry.loaded_at -= 3600
        await asyncio.wait_for(asyncio.gather(other, second), 20)
        assert running.counted("v").loads == {"ready": 1}


async def test_a_model_in_use_answers_before_it_is_closed(tmp_path):
    async with serving(tmp_path, 1, lambda to: (write(to, "a"), write_busy_bundle(to))) as running:
        await running.infer(busy(20))  # long enough for a thread, not the event loop
        model = running.model("busy")
        running.repository.find("busy", "").loaded_at = 0.0  # it has stayed for long enough
        running_one, queued = (asyncio.create_task(running.infer(busy(3000))) for _ in range(2))
        await reached(lambda: model.use.users == 2)
        other = asyncio.create_task(ask(running, "a"))
        await reached(lambda: running.repository.find("busy", "").state == "UNLOADING")
        back = asyncio.create_task(running.infer(busy(7)))  # waits for its next load
        assert not any(task.done() for task in (running_one, queued, other))
        for task, steps in ((running_one, 3000), (queued, 3000), (back, 7)):
            assert np.frombuffer((await task).raw_output_contents[0], np.int64) == [steps]
        await other
        assert running.counted("busy").failures == running.counted("a").failures == {}
        assert running.model("busy") is not model


async def test_a_stopped_load_does_not_begin_after_an_eviction(tmp_path, loads):
    async with serving(tmp_path, 1) as running:
        await ask(running, "a")
        entry, use = running.repository.find("a", ""), running.model("a").use
        entry.loaded_at, _ = 0.0, use.take()
        asked = asyncio.create_task(ask(running, "b"))
        await reached(lambda: entry.state == "UNLOADING")
        await running.control.unload_model("b")
        use.give_back()
        with pytest.raises(NotFound):
            await asked
        assert loads == {"a": 1}


async def reloaded_and_evicted(running, preparing):
    """Return entry and use of "a", a load of it that is held, and a request to "b" for which its model is evicted."""
    await ask(running, "a")
    entry, use = running.repository.find("a", ""), running.model("a").use
    entry.loaded_at, _ = 0.0, use.take()
    preparing.held = "a"
    reloaded = asyncio.create_task(running.control.load_model("a"))
    await reached(lambda: preparing["a"] == 2)
    other = asyncio.create_task(ask(running, "b"))
    await reached(lambda: entry.state == "UNLOADING")
    return entry, use, reloaded, other


async def test_a_load_that_fails_during_the_eviction_of_its_earlier_model(tmp_path, preparing):
    async with serving(tmp_path, 1) as running:
        entry, use, reloaded, other = await reloaded_and_evicted(running, preparing)
        (running.directory / "a-1" / "model.onnx").write_bytes(b"broken")
        preparing.goes_on.set()
        use.give_back()
        with pytest.raises(LoadFailed, match=r"failed to load 'a'.*model\.onnx"):
            await reloaded
        await other
        assert (loaded(running), entry.state) == ({"b"}, "UNAVAILABLE")


async def test_an_unload_during_an_eviction_is_the_last_word(tmp_path, preparing, monkeypatch):
    monkeypatch.setattr(repository_load, "_STOP_SECONDS", 0.0)
    async with serving(tmp_path, 1) as running:
        entry, use, reloaded, other = await reloaded_and_evicted(running, preparing)
        unloaded = asyncio.create_task(running.control.unload_model("a"))
        await reached(reloaded.done)
        for _ in range(10):
            await asyncio.sleep(0)
        assert (entry.state, unloaded.done()) == ("UNLOADING", False)  # its model still has a user
        preparing.goes_on.set()
        use.give_back()
        await asyncio.gather(unloaded, other)
        assert (loaded(running), entry.reason, entry.withdrawn) == ({"b"}, "unloaded", True)
        with pytest.raises(LoadFailed):
            await reloaded


async def test_a_load_that_a_client_joins_does_not_depend_on_the_requests_that_began_it(tmp_path, preparing):
    async with serving(tmp_path, 1) as running:
        preparing.held = "a"
        asked = asyncio.create_task(ask(running, "a"))
        await reached(lambda: preparing["a"])
        generation = running.repository.generation
        joined = asyncio.create_task(running.control.load_model("a"))
        await reached(lambda: running.repository.generation > generation)
        asked.cancel()
        await asyncio.wait([asked])
        preparing.goes_on.set()
        await joined
        assert loaded(running) == {"a"}


async def test_a_load_of_files_that_were_replaced_meanwhile_is_stopped(tmp_path, preparing):
    async with serving(tmp_path, 1, lambda repository: write_oracle_bundle(repository / "a-1", "a")) as running:
        preparing.held = "a"
        asked = asyncio.create_task(ask(running, "a"))
        await reached(lambda: preparing["a"])
        (replaced,) = running.control._loads._current.values()
        shutil.rmtree(running.directory / "a-1")
        write(running.directory, "a")
        reloaded = asyncio.create_task(running.control.load_model("a"))
        await reached(lambda: preparing["a"] == 2)
        assert replaced.unwanted.is_set()  # which ends a build
        preparing.goes_on.set()
        await asyncio.gather(asked, reloaded)  # by the model that the request is for


async def test_a_version_is_loaded_during_the_build_of_another_one(tmp_path, preparing):
    async with serving(tmp_path, 1, write_versions) as running:
        preparing.held = "2"
        built = asyncio.create_task(running.service.load_waits._models.ready("v", "2"))
        await reached(lambda: preparing["2"])
        entry, _ = await asyncio.wait_for(running.service.load_waits._models.ready("v", "1"), 20)
        assert (entry.state, built.done()) == ("READY", False)
        preparing.goes_on.set()
        assert (await built)[0].version == "2"


async def test_a_late_load_does_not_end_the_turn_of_its_successor(tmp_path):
    async with serving(tmp_path, None) as running:
        room, entry = running.control.room, running.repository.find("a", "")
        bundle, begun = Bundle.open(running.directory / "a-1"), []
        ends = [asyncio.Event() for _ in range(3)]

        async def load(number):
            one = Load(entry, bundle, for_requests=False)

            async def attempt(evicts):
                begun.append(number)
                await ends[number].wait()

            task = asyncio.create_task(room.load_model(one, asyncio.sleep(0), attempt, lambda progress: None))
            return one, task

        late, first = await load(0)
        await reached(lambda: begun == [0])
        room.end_turn(late)
        _, second = await load(1)
        await reached(lambda: begun == [0, 1])
        _, third = await load(2)
        ends[0].set()
        await first
        for _ in range(10):
            await asyncio.sleep(0)
        assert begun == [0, 1]
        ends[1].set()
        ends[2].set()
        await asyncio.gather(second, third)


@pytest.mark.parametrize("beside", ["", "b"])
async def test_a_runtime_that_lacks_memory_where_nothing_leaves_gives_way_to_the_next(tmp_path, monkeypatch, beside):
    class Lacking(OnnxRuntimeCpu):
        """Lacks memory for ``a`` however little else is loaded, and tells so, as TensorRT does."""

        name = "lacking"

        def load(self, source, built=None):
            if source.bundle.manifest.name != "a":
                return super().load(source, built)
            error = BackendError("memory", given="none", expected="some", fix="Free it.")
            error.lacks_memory = True
            raise error

    monkeypatch.setattr(table, "RUNTIMES", {runtime.name: runtime for runtime in (Lacking, OnnxRuntimeCpu)})
    async with serving(tmp_path, None, target="auto") as running:
        for name in beside:
            await ask(running, name)
        await ask(running, "a")
        assert (loaded(running), running.model("a").runtime.name) == ({"a"}, OnnxRuntimeCpu.name)
