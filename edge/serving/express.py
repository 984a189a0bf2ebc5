"""The short way of requests that cost next to nothing: asked before in the same form, and computed where they are.

For a model of microseconds, checking a request and waiting for its turn would take several times as long as its run.
What is checked of a request depends on everything but its id and the values of its tensors; where all that has been
accepted once, it need not be checked again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final, NamedTuple
from weakref import ref

import numpy as np

from edge.datatypes import WIRE_TYPES, Array
from edge.instruments.statistics import Timings
from edge.pb import inference_pb2 as pb
from edge.repository.model import Model
from edge.repository.repository import Entry, Repository
from edge.scheduling.lane import Lane
from edge.scheduling.scheduler import Scheduler
from edge.serving.answers import Answers
from edge.serving.parameters import Parameters
from edge.serving.service import Call

#: Forms that are remembered. Clients know few of them; who makes up more begins anew.
_MAX_FORMS: Final = 256
#: Of a request whose form is looked at. To take apart a larger one would cost more than it saves.
_MAX_BYTES: Final = 16 * 1024


class _Tensor(NamedTuple):
    """One input of a form: its name, its datatype and shape, and so the size of its raw contents."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    size_bytes: int


class _Form(NamedTuple):
    """Everything about a request but its id and the values of its tensors, once that was accepted."""

    model: ref[Model]
    lane: Lane
    tensors: tuple[_Tensor, ...]
    output_names: list[str]
    rows: int
    size: int


class Express:
    """Answers requests at once, or leaves them to the usual way. Runs on the event loop only.

    Args:
        repository: the models.
        scheduler: lends the place to compute in.
        answers: makes the responses.
    """

    def __init__(self, repository: Repository, scheduler: Scheduler, answers: Answers) -> None:
        self._repository = repository
        self._scheduler = scheduler
        self._answers = answers
        self._forms: dict[bytes, _Form] = {}

    def learn(self, call: Call) -> None:
        """Remember the form of a request that was accepted and could have taken this way."""
        request, model = call.request, call.model
        tensors = tuple(
            _Tensor(tensor.name, dtype, tuple(tensor.shape), len(contents))
            for tensor, contents in zip(request.inputs, request.raw_input_contents, strict=False)
            if (dtype := _dtype(tensor.datatype)) and not tensor.parameters
        )
        plain = call.parameters == Parameters() and not call.windows and len(model.lanes) == 1
        if not plain or [tensor.name for tensor in tensors] != [tensor.name for tensor in request.inputs]:
            return
        if {tensor.name for tensor in tensors} != {spec.name for spec in model.manifest.inputs}:
            return
        if len(self._forms) >= _MAX_FORMS:
            self._forms.clear()
        copy = pb.ModelInferRequest()
        copy.CopyFrom(request)
        form = _Form(ref(model), call.future.lane, tensors, call.output_names, call.rows, call.future.size)
        self._forms[_taken_apart(copy)[1]] = form

    def answer(self, request: pb.ModelInferRequest, deadline: float | None) -> pb.ModelInferResponse | None:
        """Return the answer to a request, which is counted; None, with the request as it was, if it has to wait.

        Raises:
            RequestError: as :meth:`edge.repository.repository.Repository.ready`.
        """
        started_ns = time.perf_counter_ns()
        if not self._forms or request.ByteSize() > _MAX_BYTES:
            return None
        if deadline is not None and deadline <= time.monotonic():
            return None
        entry, model = self._repository.ready(request.model_name, request.model_version)
        request_id = request.id
        contents, key = _taken_apart(request)
        form = self._forms.get(key)
        inputs = _inputs(form, contents) if form and form.model() is model else None
        if form and inputs and model.lease.take():
            try:
                response = self._computed(entry, model, form, inputs, request_id, started_ns)
            finally:
                self._scheduler.give_back(model.lease)
            if response:
                return response
        request.id = request_id
        request.raw_input_contents.extend(contents)
        return None

    def _computed(
        self, entry: Entry, model: Model, form: _Form, inputs: Mapping[str, Array], request_id: str, started_ns: int
    ) -> pb.ModelInferResponse | None:
        begun_ns = time.perf_counter_ns()
        computed = self._scheduler.compute_here(form.lane, inputs, form.size)
        if computed is None:
            return None
        computed_ns = time.perf_counter_ns()
        made = self._answers.make(
            model, computed.outputs, form.output_names, request_id=request_id, tier=form.lane.tier
        )
        ended_ns = time.perf_counter_ns()
        timings = Timings(
            compute_input_ns=begun_ns - started_ns,
            compute_infer_ns=computed_ns - begun_ns,
            compute_output_ns=ended_ns - computed_ns,
            request_ns=ended_ns - started_ns,
        )
        form.lane.latency.observe(form.size, timings.compute_infer_ns / 1e9)
        entry.statistics.executed(form.rows, timings.compute_infer_ns)
        entry.statistics.succeeded(timings, form.rows, form.rows, nonfinite=made.nonfinite)
        return made.response


def _taken_apart(request: pb.ModelInferRequest) -> tuple[list[bytes], bytes]:
    """Take id and raw contents out of a request, and return the contents and the rest, which says all about them."""
    contents = list(request.raw_input_contents)
    request.ClearField("raw_input_contents")
    request.ClearField("id")
    return contents, request.SerializeToString()


def _dtype(datatype: str) -> np.dtype[np.generic] | None:
    """Return how NumPy reads raw contents as they are; None where they are more than numbers in a row."""
    return None if datatype in ("BOOL", "BYTES") else WIRE_TYPES[datatype]


def _inputs(form: _Form, contents: list[bytes]) -> dict[str, Array] | None:
    if [len(data) for data in contents] != [tensor.size_bytes for tensor in form.tensors]:
        return None
    return {
        tensor.name: np.frombuffer(data, tensor.dtype).reshape(tensor.shape)
        for tensor, data in zip(form.tensors, contents, strict=True)
    }
