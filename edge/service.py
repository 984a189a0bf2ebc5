"""The inference service itself: requests in, responses or errors out, and no transport anywhere."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from edge import __version__
from edge.datatypes import Array
from edge.device import DeviceThread
from edge.errors import InvalidRequest, RequestError
from edge.model import Model
from edge.parameters import TIER, Parameters, parse
from edge.pb import inference_pb2 as pb
from edge.repository import Entry, Repository
from edge.statistics import Timings
from edge.wire import decode_inputs, encode_outputs, requested_outputs

#: What ServerMetadata claims: only what is there.
EXTENSIONS = ("binary_tensor_data", "model_configuration", "parameters", "statistics")


class Answer(NamedTuple):
    """The outputs of the graph, and which tiers gave them."""

    outputs: dict[str, Array]
    tier: str


@dataclass(slots=True)
class Call:
    """One ModelInfer on its way. ``future`` gives the answer; then :meth:`InferenceService.finish` the response."""

    request: pb.ModelInferRequest
    entry: Entry
    model: Model
    output_names: list[str]
    rows: int
    started_ns: int
    parameters: Parameters
    future: Future[Answer]
    timings: Timings = field(default_factory=Timings)


class InferenceService:
    """Answers the RPCs of GRPCInferenceService.

    Args:
        repository: the models.
        device: where they compute.
        strict_readiness: whether the server is ready only when every bundle is.
    """

    def __init__(self, repository: Repository, device: DeviceThread, *, strict_readiness: bool = True) -> None:
        self._repository = repository
        self._device = device
        self._strict_readiness = strict_readiness
        #: Set when all bundles were tried, cleared when the server begins to drain.
        self.accepting = False

    def start(self, request: pb.ModelInferRequest, deadline: float | None) -> Call:
        """Check a request, preprocess it and queue it.

        Args:
            request: the client's message.
            deadline: ``time.monotonic()`` seconds at which the client stops waiting; None if it waits for ever.

        Returns:
            The call; the caller waits for its ``future`` and then calls :meth:`finish` or :meth:`failed`.

        Raises:
            RequestError: the request cannot be answered. It is counted already.
        """
        started_ns = time.perf_counter_ns()
        entry, model = self._repository.ready(request.model_name, request.model_version)
        try:
            parameters = parse(request)
            tier = parameters.tier or model.default_tier
            model.check_tier(tier)
            names = requested_outputs(request, model.outputs)
            feeds = model.prepare(decode_inputs(request, model.inputs))
            if parameters.timeout_seconds is not None:
                limit = time.monotonic() + parameters.timeout_seconds
                deadline = limit if deadline is None else min(deadline, limit)
            timings = Timings(compute_input_ns=time.perf_counter_ns() - started_ns)
            queued_ns = time.perf_counter_ns()

            def compute() -> Answer:
                begun_ns = time.perf_counter_ns()
                answer = Answer(*model.infer(tier, feeds.inputs))
                timings.queue_ns = begun_ns - queued_ns
                timings.compute_infer_ns = time.perf_counter_ns() - begun_ns
                return answer

            future = self._device.submit(compute, deadline)
        except RequestError as error:
            entry.statistics.failed(type(error).__name__, time.perf_counter_ns() - started_ns)
            raise
        return Call(request, entry, model, names, feeds.rows, started_ns, parameters, future, timings)

    def finish(self, call: Call, answer: Answer) -> pb.ModelInferResponse:
        """Return the response of a call whose answer is there, and count it."""
        begun_ns = time.perf_counter_ns()
        response = pb.ModelInferResponse(
            model_name=call.model.name, model_version=call.model.version, id=call.request.id
        )
        encode_outputs(response, call.model.complete(answer.outputs), call.output_names)
        timings = call.timings
        now_ns = time.perf_counter_ns()
        timings.compute_output_ns = now_ns - begun_ns
        timings.request_ns = now_ns - call.started_ns
        if len(call.model.tiers) > 1:
            response.parameters[TIER].string_param = answer.tier
        if call.parameters.timings:
            for stage in ("queue_ns", "compute_input_ns", "compute_infer_ns", "compute_output_ns", "request_ns"):
                response.parameters[stage].int64_param = getattr(timings, stage)
        call.entry.statistics.succeeded(timings, call.rows)
        return response

    def failed(self, call: Call, reason: str) -> None:
        """Count a call that ended without an answer."""
        call.entry.statistics.failed(reason, time.perf_counter_ns() - call.started_ns)

    def server_ready(self) -> bool:
        """Whether the server takes requests and, if strict, every bundle is ready."""
        return self.accepting and (self._repository.all_ready or not self._strict_readiness)

    def model_ready(self, request: pb.ModelReadyRequest) -> bool:
        """Whether a model can be asked; an unknown one cannot.

        Raises:
            InvalidRequest: the version is not a positive integer.
        """
        try:
            self._repository.ready(request.name, request.version)
        except InvalidRequest:
            raise
        except RequestError:
            return False
        return self.accepting

    def server_metadata(self) -> pb.ServerMetadataResponse:
        """Return the server's name, version and the protocol extensions that it offers."""
        return pb.ServerMetadataResponse(name="fewheads", version=__version__, extensions=EXTENSIONS)

    def model_metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        """Return a model's inputs and outputs, batch dimension included.

        Raises:
            RequestError: there is no such model, or it is not ready.
        """
        _, model = self._repository.ready(request.name, request.version)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        versions = [entry.version for entry in self._repository if entry.name == model.name and entry.state == "READY"]
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=versions,
            platform=model.runner.platform,
            inputs=[tensor(name=s.name, datatype=s.datatype, shape=s.shape) for s in model.inputs.values()],
            outputs=[tensor(name=s.name, datatype=s.datatype, shape=s.shape) for s in model.outputs.values()],
        )

    def model_config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        """Return a model's configuration in Triton's terms; dims are without the batch dimension.

        Raises:
            RequestError: there is no such model, or it is not ready.
        """
        _, model = self._repository.ready(request.name, request.version)
        skip = 1 if model.manifest.max_batch_size else 0
        config = pb.ModelConfig(
            name=model.name,
            platform=model.runner.platform,
            backend=model.runner.platform.partition("_")[0],
            max_batch_size=model.manifest.max_batch_size,
            default_model_filename=model.manifest.tiers[0].artifacts[0].file,
        )
        config.version_policy.specific.versions.append(int(model.version))
        for spec in model.inputs.values():
            data_type, dims = _data_type(spec.datatype), spec.shape[skip:]
            config.input.add(name=spec.name, data_type=data_type, dims=dims, optional=spec.name in model.optional)
        for spec in model.outputs.values():
            config.output.add(name=spec.name, data_type=_data_type(spec.datatype), dims=spec.shape[skip:])
        config.parameters["golden_max_abs_diff"].string_value = f"{model.golden_max_abs_diff:.3g}"
        kind = pb.ModelInstanceGroup.KIND_GPU if model.runner.device == "GPU" else pb.ModelInstanceGroup.KIND_CPU
        config.instance_group.add(name=f"{model.name}_0", count=1, kind=kind)
        return pb.ModelConfigResponse(config=config)

    def model_statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        """Return the counters of one model, or of all of them.

        Raises:
            RequestError: there is no such model.
        """
        entries = [self._repository.find(request.name, request.version)] if request.name else list(self._repository)
        return pb.ModelStatisticsResponse(model_stats=[_statistics(entry) for entry in entries if entry.version])

    def repository_index(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        """Return every bundle with its state, and the reason if it is not ready."""
        response = pb.RepositoryIndexResponse()
        for entry in self._repository:
            if entry.state == "READY" or not request.ready:
                response.models.add(name=entry.name, version=entry.version, state=entry.state, reason=entry.reason)
        return response


def _data_type(datatype: str) -> pb.DataType:
    return getattr(pb, "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}")  # type: ignore[no-any-return]


def _statistics(entry: Entry) -> pb.ModelStatistics:
    now = entry.statistics.snapshot()
    stages = now.stages
    message = pb.ModelStatistics(
        name=entry.name,
        version=entry.version,
        last_inference=now.last_inference_ms,
        inference_count=now.inference_count,
        execution_count=now.execution_count,
    )
    durations = message.inference_stats
    durations.success.count, durations.success.ns = stages["request"].count, stages["request"].total_ns
    durations.fail.count, durations.fail.ns = now.fail, now.fail_ns
    for name in ("queue", "compute_input", "compute_infer", "compute_output"):
        duration = getattr(durations, name)
        duration.count, duration.ns = stages[name].count, stages[name].total_ns
    for rows, totals in sorted(now.batches.items()):
        batch = message.batch_stats.add(batch_size=rows)
        for name in ("compute_input", "compute_infer", "compute_output"):
            duration = getattr(batch, name)
            duration.count, duration.ns = totals.count, getattr(totals, f"{name}_ns")
    return message
