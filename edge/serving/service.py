"""The inference service itself: requests in, responses or errors out, and no transport anywhere."""

from __future__ import annotations

import time
from dataclasses import dataclass

from edge import __version__
from edge.errors import DeadlineExceeded, InvalidRequest, ModelNotReady, Overloaded, RequestError
from edge.health.health import Health
from edge.instruments.traces import Traces
from edge.pb import inference_pb2 as pb
from edge.repository.model import Model
from edge.repository.repository import Entry, Repository
from edge.scheduling.elastic import Demand
from edge.scheduling.job import DEFAULT_PRIORITY, PRIORITY_LEVELS, Answer, Job
from edge.scheduling.lane import Lane
from edge.scheduling.scheduler import Scheduler
from edge.serving.answers import Answers
from edge.serving.parameters import TIER, TIER_REASON, Parameters, parse
from edge.serving.shared_memory import SharedMemory, Window
from edge.serving.shared_tensors import output_windows
from edge.serving.wire import decode_inputs, requested_outputs

#: What ServerMetadata claims: only what is there. What options switch on is added.
EXTENSIONS = ("binary_tensor_data", "model_configuration", "parameters", "schedule_policy", "statistics")
#: A transport's timer may be this early.
_CLOCK_SECONDS = 0.005


@dataclass(slots=True)
class Call:
    """One ModelInfer on its way. ``future`` gives the answer; then :meth:`InferenceService.finish` the response.

    ``wait_seconds`` is how long to wait for it where the server sets the limit, by the request's ``timeout`` or its
    own default; None where the client's deadline, which ends the call by itself, comes first.
    """

    request: pb.ModelInferRequest
    entry: Entry
    model: Model
    output_names: list[str]
    rows: int
    started_ns: int
    parameters: Parameters
    future: Job
    tier_reason: str
    wait_seconds: float | None
    windows: dict[str, Window]


class InferenceService:
    """Answers the RPCs of GRPCInferenceService.

    Args:
        repository: the models.
        scheduler: where they compute.
        health: what is wrong, if anything is.
        answers: makes the responses.
        strict_readiness: whether the server is ready only when every bundle is.
        default_timeout_seconds: for requests that bring no deadline of their own; None lets them wait for ever.
        shared_memory: where tensors may lie; None where that is not allowed.
        extensions: names of protocol extensions that are on beside :data:`EXTENSIONS`.
        traces: where requests are traced; None traces none.
    """

    def __init__(
        self,
        repository: Repository,
        scheduler: Scheduler,
        health: Health,
        answers: Answers,
        *,
        strict_readiness: bool = True,
        default_timeout_seconds: float | None = None,
        shared_memory: SharedMemory | None = None,
        extensions: tuple[str, ...] = (),
        traces: Traces | None = None,
    ) -> None:
        self._repository = repository
        self._scheduler = scheduler
        self._health = health
        self._strict_readiness = strict_readiness
        self._default_timeout = default_timeout_seconds
        self._shared_memory = shared_memory
        self._extensions = (*EXTENSIONS, *extensions)
        self._traces = traces
        self._answers = answers
        #: Set when all bundles were tried, cleared when the server begins to drain.
        self.accepting = False

    @property
    def traced(self) -> bool:
        """Whether requests are traced."""
        return self._traces is not None

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
        entry, model = self._taken(request)
        try:
            parameters = parse(request)
            names = requested_outputs(request, model.outputs)
            windows = output_windows(request, self._shared_memory)
            feeds = model.prepare(decode_inputs(request, model.inputs, self._shared_memory))
            wait_seconds = self._limit(parameters, deadline)
            if wait_seconds is not None:
                deadline = time.monotonic() + wait_seconds
            job = Job(
                model.lanes[model.full_tier],
                feeds.inputs,
                feeds.rows,
                priority=parameters.priority,
                deadline=deadline,
                lease=model.lease,
                statistics=entry.statistics,
            )
            choice = model.elastic.choose(parameters.tier, parameters.policy, lambda: self._demand(job))
            job.lane = choice.lane
            job.queued_ns = time.perf_counter_ns()
            job.timings.compute_input_ns = job.queued_ns - started_ns
            self._scheduler.submit(job)
        except BaseException as error:
            self._scheduler.give_back(model.lease)
            if isinstance(error, Exception):
                place = error.cause if isinstance(error, Overloaded) else _refused_at(error)
                entry.statistics.failed(type(error).__name__, time.perf_counter_ns() - started_ns, place)
                if self._traces:
                    self._traces.failed(request, started_ns, type(error).__name__)
            raise
        return Call(
            request,
            entry,
            model,
            names,
            feeds.rows,
            started_ns,
            parameters,
            job,
            choice.reason,
            wait_seconds,
            windows,
        )

    def _taken(self, request: pb.ModelInferRequest) -> tuple[Entry, Model]:
        """Return the model of a request, kept from being closed until its lease is given back."""
        for _ in range(2):  # a model that was just replaced is gone; then its successor is there
            entry, model = self._repository.ready(request.model_name, request.model_version)
            if model.lease.take():
                return entry, model
        raise ModelNotReady(f"model {model.name!r}", given="UNLOADING", expected="READY", fix="Ask again later.")

    def _limit(self, parameters: Parameters, deadline: float | None) -> float | None:
        """Return the seconds that the server allows a request, if it does so and the client does not allow less."""
        limit = parameters.timeout_seconds
        if limit is None:
            limit = self._default_timeout
        if limit is None or (deadline is not None and deadline <= time.monotonic() + limit):
            return None
        return limit

    def _demand(self, job: Job) -> Demand:
        now = time.monotonic()

        def finish(lane: Lane) -> float:
            job.lane = lane
            return self._scheduler.finish_seconds(job)

        left = None if job.deadline is None else job.deadline - now
        return Demand(now, job.size, left, finish, self._scheduler.fullness, self._scheduler.instances)

    def finish(self, call: Call, answer: Answer) -> pb.ModelInferResponse:
        """Return the response of a call whose answer is there, and count it."""
        begun_ns = time.perf_counter_ns()
        response, nonfinite = self._answers.make(
            call.model,
            answer.outputs,
            call.output_names,
            request_id=call.request.id,
            tier=answer.tier,
            windows=call.windows,
        )
        timings = call.future.timings
        now_ns = time.perf_counter_ns()
        timings.compute_output_ns += now_ns - begun_ns
        self._scheduler.returned((now_ns - call.future.computed_ns) / 1e9)
        timings.request_ns = now_ns - call.started_ns
        tier = answer.tier if len(call.model.tiers) > 1 else ""
        if tier:
            response.parameters[TIER].string_param = tier
            response.parameters[TIER_REASON].string_param = call.tier_reason
            call.entry.statistics.answered(tier, call.tier_reason)
        if call.parameters.timings:
            for stage in ("queue_ns", "compute_input_ns", "compute_infer_ns", "compute_output_ns", "request_ns"):
                response.parameters[stage].int64_param = getattr(timings, stage)
        call.entry.statistics.succeeded(timings, call.rows, call.future.batch_rows, tier=tier, nonfinite=nonfinite)
        if self._traces:
            self._traces.answered(call, tier)
        return response

    def failed(self, call: Call, reason: str) -> None:
        """Count a call that ended without an answer.

        Args:
            call: the call.
            reason: the class of its error, or ``Cancelled``. A transport cancels what runs out of time too; that counts
                as DeadlineExceeded.
        """
        job, place = call.future, ""
        if reason == "Cancelled" and job.deadline is not None and time.monotonic() > job.deadline - _CLOCK_SECONDS:
            reason = DeadlineExceeded.__name__
        if reason in ("Cancelled", DeadlineExceeded.__name__):
            place = job.place
        if job.computed_ns and reason == DeadlineExceeded.__name__:
            self._scheduler.returned((time.perf_counter_ns() - job.computed_ns) / 1e9)  # at least
        call.entry.statistics.failed(reason, time.perf_counter_ns() - call.started_ns, place)
        if self._traces:
            self._traces.failed(call.request, call.started_ns, reason)

    def server_ready(self) -> bool:
        """Whether the server takes requests, its device computes and, if strict, every bundle is ready."""
        models_ready = self._health.models_ready() or not self._strict_readiness
        return self.accepting and self._health.server_sound() and models_ready

    def model_ready(self, request: pb.ModelReadyRequest) -> bool:
        """Whether a model can be asked and is sound; an unknown one cannot.

        Raises:
            InvalidRequest: the version is not a positive integer.
        """
        try:
            entry, _ = self._repository.ready(request.name, request.version)
        except InvalidRequest:
            raise
        except RequestError:
            return False
        return self.accepting and self._health.state(entry)[0] == "READY"

    def server_metadata(self) -> pb.ServerMetadataResponse:
        """Return the server's name, version and the protocol extensions that it offers."""
        return pb.ServerMetadataResponse(name="fewheads", version=__version__, extensions=self._extensions)

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
        config.instance_group.add(name=f"{model.name}_0", count=model.instances, kind=kind)
        lane = model.lanes[model.full_tier]
        if lane.max_rows:
            batching = config.dynamic_batching
            batching.preferred_batch_size.extend(lane.preferred_rows)
            batching.max_queue_delay_microseconds = round(lane.max_delay_seconds * 1e6)
            batching.priority_levels, batching.default_priority_level = PRIORITY_LEVELS, DEFAULT_PRIORITY
            policy = batching.default_queue_policy
            policy.max_queue_size = self._scheduler.max_queue_size
            policy.default_timeout_microseconds = round((self._default_timeout or 0) * 1e6)
            policy.allow_timeout_override = True
        return pb.ModelConfigResponse(config=config)

    def model_statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        """Return the counters of one version, or of all of a model, or of all models.

        Raises:
            RequestError: there is no such model.
        """
        entries = list(self._repository)
        if request.name:
            found = self._repository.find(request.name, request.version)
            entries = [found] if request.version else [entry for entry in entries if entry.name == request.name]
        return pb.ModelStatisticsResponse(model_stats=[_statistics(entry) for entry in entries if entry.version])

    def repository_index(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        """Return every bundle with its state, and the reason if it is not ready."""
        response = pb.RepositoryIndexResponse()
        for entry in self._repository:
            state, reason = self._health.state(entry)
            if state == "READY" or not request.ready:
                response.models.add(name=entry.name, version=entry.version, state=state, reason=reason)
        return response


def _refused_at(error: Exception) -> str:
    return "refused" if isinstance(error, DeadlineExceeded) else ""


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
