"""The RPCs that describe the server and its models: readiness, metadata, configuration, statistics, index."""

from __future__ import annotations

from collections.abc import Callable

from edge import __version__
from edge.errors import InvalidRequest, PermissionDenied, RequestError
from edge.health.health import Health
from edge.pb import inference_pb2 as pb
from edge.protocol import PREPROCESS, SPACE
from edge.repository.entry import Entry
from edge.repository.model import Model
from edge.repository.repository import NotLoaded, Repository
from edge.scheduling.job import DEFAULT_PRIORITY, PRIORITY_LEVELS
from edge.scheduling.scheduler import Scheduler
from edge.serving.inference import InferenceService

#: The protocol extensions that every server has.
EXTENSIONS = (
    *("binary_tensor_data", "classification", "model_configuration", "parameters", "schedule_policy", "statistics"),
)


class Metadata:
    """Answers the RPCs that describe the server and its models; to describe one that is not ready is a RequestError.

    ``extensions`` are enabled beside :data:`EXTENSIONS`. Where requests load models, ``service`` loads one to describe
    it, because its runtime and its tensors are known then. That counts as a request of the caller.
    """

    def __init__(
        self,
        repository: Repository,
        scheduler: Scheduler,
        health: Health,
        *,
        default_timeout_seconds: float | None = None,
        extensions: tuple[str, ...] = (),
        service: InferenceService | None = None,
    ) -> None:
        self._repository, self._scheduler, self._health = repository, scheduler, health
        self._default_timeout = default_timeout_seconds
        self._extensions, self._service = (*EXTENSIONS, *extensions), service
        self.server_ready = health.server_ready

    def model_ready(self, request: pb.ModelReadyRequest) -> bool:
        """Return whether a model answers requests, loaded or not, and is healthy; False for an unknown one."""
        try:
            entry = self._repository.find(request.name, request.version)
        except InvalidRequest:
            raise
        except RequestError:
            return False
        return self._health.accepting and self._health.model_ready(entry)

    def server_metadata(self) -> pb.ServerMetadataResponse:
        """Return the server's name, version and protocol extensions."""
        return pb.ServerMetadataResponse(name="fewheads", version=__version__, extensions=self._extensions)

    async def model_metadata(
        self, request: pb.ModelMetadataRequest, check_may_infer: Callable[[], object] = lambda: None
    ) -> pb.ModelMetadataResponse:
        """Return a model's inputs and outputs, batch dimension included.

        ``check_may_infer`` is called before a model is loaded, and raises a PermissionDenied if the caller may not
        cause that.
        """
        model = await self._model(request.name, request.version, check_may_infer)
        response = pb.ModelMetadataResponse(name=model.name, platform=model.runner.platform)
        response.versions.extend(entry.version for entry in self._repository.named(model.name) if entry.answers)
        for tensors, specs in ((response.inputs, model.inputs), (response.outputs, model.outputs)):
            for spec in specs.values():
                tensors.add(name=spec.name, datatype=spec.datatype, shape=spec.shape)
        return response

    async def model_config(
        self, request: pb.ModelConfigRequest, check_may_infer: Callable[[], object] = lambda: None
    ) -> pb.ModelConfigResponse:
        """Return a model's configuration in Triton's terms, as :meth:`model_metadata`; dims are without the batch
        dimension.
        """
        model = await self._model(request.name, request.version, check_may_infer)
        skip = 1 if model.manifest.max_batch_size else 0
        config = pb.ModelConfig(
            name=model.name,
            platform=model.runner.platform,
            backend=model.runner.platform.partition("_")[0],
            max_batch_size=model.manifest.max_batch_size,
            default_model_filename=model.file,
        )
        config.version_policy.specific.versions.append(int(model.version))
        for spec in model.inputs.values():
            data_type, dims = _data_type(spec.datatype), spec.shape[skip:]
            config.input.add(name=spec.name, data_type=data_type, dims=dims, optional=spec.name in model.optional)
        for spec in model.outputs.values():
            config.output.add(name=spec.name, data_type=_data_type(spec.datatype), dims=spec.shape[skip:])
        if model.manifest.preprocess:
            config.parameters[PREPROCESS].string_value = str(model.manifest.preprocess.__struct_config__.tag)
        if len(model.tiers) > 1:
            config.parameters["tiers"].string_value = ", ".join(model.tiers)
        if model.manifest.space:
            config.parameters[SPACE].string_value = model.manifest.space
        config.parameters["runtime"].string_value = model.runtime.name
        config.parameters["runtime_reason"].string_value = model.runtime.reason
        config.parameters["golden_max_abs_diff"].string_value = f"{max(model.golden_diffs.values()):.3g}"
        kind = pb.ModelInstanceGroup.KIND_GPU if model.runner.device == "GPU" else pb.ModelInstanceGroup.KIND_CPU
        config.instance_group.add(name=f"{model.name}_0", count=model.instances, kind=kind)
        executor = model.executors[model.full_tier]
        if executor.max_rows:
            batching = config.dynamic_batching
            batching.preferred_batch_size.extend(executor.preferred_rows)
            batching.max_queue_delay_microseconds = round(executor.max_delay_seconds * 1e6)
            batching.priority_levels, batching.default_priority_level = PRIORITY_LEVELS, DEFAULT_PRIORITY
            policy = batching.default_queue_policy
            policy.max_queue_size = self._scheduler.queue.max_jobs
            policy.default_timeout_microseconds = round((self._default_timeout or 0) * 1e6)
            policy.allow_timeout_override = True
        return pb.ModelConfigResponse(config=config)

    def model_statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        """Return the counters of one version, of all versions of a model, or of all models."""
        entries = list(self._repository)
        if request.name:
            entry = self._repository.find(request.name, request.version)
            entries = [entry] if request.version else [entry for entry in entries if entry.name == request.name]
        return pb.ModelStatisticsResponse(model_stats=[_statistics(entry) for entry in entries if entry.version])

    async def _model(self, name: str, version: str, check_may_infer: Callable[[], object]) -> Model:
        try:
            return self._repository.ready(name, version)[1]
        except NotLoaded:
            assert self._service
        try:
            check_may_infer()
        except PermissionDenied as error:
            given, expected, fix = error.given, error.expected, error.fix
            raise PermissionDenied(f"load of model {name!r}", given=given, expected=expected, fix=fix) from None
        self._service.admit()
        return await self._service.load_waits.ready(name, version)

    def repository_index(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        """Return the state of every bundle, or only of the ready ones, with the reason if it is not ready."""
        response = pb.RepositoryIndexResponse()
        for entry in self._repository:
            state, reason = self._health.state(entry)
            if state == "READY" or not request.ready:
                response.models.add(name=entry.name, version=entry.version, state=state, reason=reason)
        return response


def _data_type(datatype: str) -> pb.DataType:
    return getattr(pb, "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}")  # type: ignore[no-any-return]


def _statistics(entry: Entry) -> pb.ModelStatistics:
    now = entry.statistics.snapshot()
    message = pb.ModelStatistics(
        name=entry.name,
        version=entry.version,
        last_inference=now.last_inference_ms,
        inference_count=now.inference_count,
        execution_count=now.execution_count,
    )
    durations = message.inference_stats
    durations.fail.count, durations.fail.ns = now.fail, now.fail_ns
    for stage, measured in now.stages.items():
        duration = getattr(durations, "success" if stage == "request" else stage)
        duration.count, duration.ns = measured.count, measured.total
    for rows, totals in sorted(now.batches.items()):
        batch = message.batch_stats.add(batch_size=rows)
        for name in ("compute_input", "compute_infer", "compute_output"):
            duration = getattr(batch, name)
            duration.count, duration.ns = totals.count, getattr(totals, f"{name}_ns")
    return message
