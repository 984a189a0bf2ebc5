"""The short way gives the same answers as the long one, counts them alike, and leaves alone what is not its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from edge.serving.answers import Answers
from edge.serving.calls import Calls
from edge.serving.express import Express
from edge.serving.service import InferenceService

from edge.errors import InvalidRequest, NotFound
from edge.health.health import Health
from edge.pb import inference_pb2 as pb
from edge.repository.repository import Entry, Repository
from edge.scheduling.lane import ServingOptions
from edge.scheduling.scheduler import Scheduler
from edge.serving.control import ModelControl
from tests.edge.conftest import ORACLE
from tests.edge.models import write_oracle_bundle
from tests.edge.test_status_codes import expression, good, parameter, typed


class Serving(NamedTuple):
    calls: Calls
    express: Express
    repository: Repository
    control: ModelControl
    directory: Path

    def hurry(self) -> None:
        """Let the model pass for as quick as it is on a machine that does nothing else."""
        _, model = self.repository.ready(ORACLE, "")
        for lane in model.lanes.values():
            for rows in (1, 2, 64) * 100:
                lane.latency.observe(rows, 1e-5)

    @property
    def counted(self) -> tuple[int, int]:
        """Requests that were answered, and runs."""
        now = self.repository.find(ORACLE, "").statistics.snapshot()
        return now.success, now.execution_count


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Serving]:
    write_oracle_bundle(tmp_path / "first")
    scheduler = Scheduler(256, device_bound=False)
    repository = Repository(tmp_path, scheduler, target="auto", cache=None, options=ServingOptions())
    answers = Answers()
    health = Health(repository, scheduler.runs, watchdog_seconds=60)
    service = InferenceService(repository, scheduler, health, answers)
    express = Express(repository, scheduler, answers)
    calls = Calls(service, express=express)

    async def told(entry: Entry) -> None:
        pass

    control = ModelControl(repository, calls, "explicit", told)
    await control.start(None)
    yield Serving(calls, express, repository, control, tmp_path)
    repository.close()
    scheduler.close()


async def answered(serving: Serving, request: pb.ModelInferRequest) -> pb.ModelInferResponse | None:
    """Ask as a request that has been asked before in the same form, and return what the short way says."""
    serving.hurry()
    again = pb.ModelInferRequest.FromString(request.SerializeToString())
    await serving.calls.infer(again, None)
    return serving.express.answer(request, None)


@pytest.mark.parametrize("rows", [1, 2, 64])
async def test_the_same_answer(serving: Serving, rows: int) -> None:
    request = good(rows)
    request.id = "seven"
    serving.hurry()
    long = await serving.calls.infer(pb.ModelInferRequest.FromString(request.SerializeToString()), None)
    assert serving.counted == (1, 1)
    assert serving.express.answer(request, None) == long
    assert serving.counted == (2, 2)


async def test_other_values_and_another_id_are_of_the_same_form(serving: Serving) -> None:
    await answered(serving, good())
    request = good()
    request.id = "another"
    request.raw_input_contents[0] = np.array([[5, *[0.5] * 14]], np.float32).tobytes()
    answer = serving.express.answer(request, None)
    assert answer
    assert (answer.id, np.frombuffer(answer.raw_output_contents[0], np.float32)[0]) == ("another", 5)


@pytest.mark.parametrize(
    "request_",
    [typed(), expression(b"1 + 1"), parameter("timings", bool_param=True), parameter("zz", string_param="a")],
    ids=["typed", "text", "timings", "another parameter"],
)
async def test_what_takes_the_long_way_always(serving: Serving, request_: pb.ModelInferRequest) -> None:
    before = request_.SerializeToString(deterministic=True)
    taken = await answered(serving, request_)
    if "zz" in request_.parameters:
        assert taken  # a parameter without a meaning is a part of the form
        return
    assert taken is None
    assert request_.SerializeToString(deterministic=True) == before


async def test_contents_of_another_size_are_refused_as_ever(serving: Serving) -> None:
    await answered(serving, good())
    request = good()
    request.id = "short"
    request.raw_input_contents[0] = bytes(8)
    before = request.SerializeToString()
    assert serving.express.answer(request, None) is None
    assert request.SerializeToString() == before
    with pytest.raises(InvalidRequest, match="8 raw bytes"):
        await serving.calls.infer(request, None)


async def test_too_late_takes_the_long_way(serving: Serving) -> None:
    await answered(serving, good())
    assert serving.express.answer(good(), 0.0) is None
    assert serving.express.answer(good(), float("inf"))


async def test_a_successor_answers_at_once(serving: Serving) -> None:
    await answered(serving, good())
    write_oracle_bundle(serving.directory / "second", ORACLE, 2)
    await serving.control.load_model(ORACLE)
    assert serving.express.answer(good(), None) is None
    answer = await answered(serving, good())
    assert answer
    assert answer.model_version == "2"


async def test_an_unloaded_model_is_not_found(serving: Serving) -> None:
    await answered(serving, good())
    await serving.control.unload_model(ORACLE)
    with pytest.raises(NotFound):
        serving.express.answer(good(), None)


async def test_who_makes_up_forms_fills_no_memory(serving: Serving) -> None:
    for number in range(600):
        await serving.calls.infer(parameter(f"p{number}", bool_param=True), None)
    assert len(serving.express._forms) <= 256
