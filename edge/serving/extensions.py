"""Triton's extensions of the protocol: model control, shared memory, and the settings of log and trace."""

from __future__ import annotations

from typing import Final, NoReturn

from edge.errors import InvalidRequest, Raw, Unsupported
from edge.instruments.logs import Logs
from edge.pb import inference_pb2 as pb
from edge.repository.control import ModelControl
from edge.repository.repository import Repository
from edge.serving.shared_memory import SharedMemory, no_shared_memory
from edge.serving.traces import Traces

#: Triton's trace settings without tracing, and those that tracing changes.
_NOT_TRACED: Final[dict[str, tuple[str, ...]]] = {
    "trace_file": ("",),
    "trace_level": ("OFF",),
    "trace_rate": ("1000",),
    "trace_count": ("-1",),
    "log_frequency": ("0",),
    "trace_mode": ("triton",),
}
_TRACED: Final = {"trace_level": ("TIMESTAMPS",), "trace_mode": ("opentelemetry",)}
#: The field of a log setting by the type of its value.
_SETTING_FIELDS: Final = {bool: "bool_param", int: "uint32_param", str: "string_param"}


def extensions(control_mode: str, shared_memory: SharedMemory | None) -> tuple[str, ...]:
    """Return the names of the enabled extensions, as ServerMetadata lists them."""
    control = ("model_repository",) if control_mode in ("explicit", "on-demand") else ()
    return ("logging", *control, *(("system_shared_memory",) if shared_memory else ()))


class Extensions:
    """Answers the RPCs of the extensions. Those that the server does not allow raise Unsupported."""

    def __init__(
        self,
        repository: Repository,
        control: ModelControl,
        shared_memory: SharedMemory | None,
        logs: Logs,
        *,
        allow_log_settings: bool = False,
        traces: Traces | None = None,
    ) -> None:
        self._repository, self._control, self._shared_memory = repository, control, shared_memory
        self._logs, self._allow_log_settings = logs, allow_log_settings
        self._trace_settings = dict(_NOT_TRACED)
        if traces:
            rate = round(1 / traces.ratio) if traces.ratio else 0
            self._trace_settings |= {**_TRACED, "trace_rate": (str(rate),)}

    async def list_unloaded(self, repository_name: str = "") -> None:
        """Update the list of models that clients can load."""
        _check_repository(repository_name)
        await self._control.list_unloaded()

    async def load_model(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        """Load or reload every version of a model, as far as there is room. The old versions keep serving where that
        fails.
        """
        self._control.check_explicit("RepositoryModelLoad")
        _check_repository(request.repository_name)
        for name in request.parameters:
            fix = "Put it into the bundle, and load that."
            expected = "none: a model is served as its bundle says"
            raise Unsupported("load parameter", given=name, expected=expected, fix=fix)
        await self._control.load_model(request.model_name)
        return pb.RepositoryModelLoadResponse()

    async def unload_model(self, request: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        """Unload every version of a model after its last request. An unknown model is no error.

        Requests do not load it again until :meth:`load_model`.
        """
        self._control.check_explicit("RepositoryModelUnload")
        _check_repository(request.repository_name)
        for name, parameter in request.parameters.items():
            kind = parameter.WhichOneof("parameter_choice")
            if name != "unload_dependents":
                raise Unsupported("unload parameter", given=name, expected="unload_dependents", fix="Leave it out.")
            if kind != "bool_param":
                given = Raw(kind or "nothing")
                raise InvalidRequest(f"parameter {name!r}", given=given, expected="bool_param", fix="Leave it out.")
        await self._control.unload_model(request.model_name)
        return pb.RepositoryModelUnloadResponse()

    def shared_memory_status(self, request: pb.SystemSharedMemoryStatusRequest) -> pb.SystemSharedMemoryStatusResponse:
        """Return a registered region, or all of them without a name."""
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._allowed().regions(request.name):
            status = response.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size
        return response

    def register_shared_memory(
        self, request: pb.SystemSharedMemoryRegisterRequest
    ) -> pb.SystemSharedMemoryRegisterResponse:
        """Register a region."""
        self._allowed().register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def unregister_shared_memory(
        self, request: pb.SystemSharedMemoryUnregisterRequest
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """Unregister a region, or all of them without a name. An unknown one is no error."""
        self._allowed().unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    def refuse_cuda_shared_memory(self) -> NoReturn:
        """Raise Unsupported for a region in GPU memory."""
        expected = "system shared memory: a Jetson, where CPU and GPU share theirs, has no CUDA IPC"
        fix = "Register a POSIX shared memory object with SystemSharedMemoryRegister."
        raise Unsupported("shared memory", given=Raw("a CUDA IPC handle"), expected=expected, fix=fix)

    def trace_setting(self, request: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
        """Return the trace settings. A request may repeat or clear a setting, but not change it."""
        if request.model_name:
            self._repository.find(request.model_name, "")
        for name, setting in request.settings.items():
            if name not in self._trace_settings:
                expected = f"one of {', '.join(self._trace_settings)}"
                raise InvalidRequest("trace setting", given=name, expected=expected, fix="Choose one of these.")
            if setting.value and tuple(setting.value) != self._trace_settings[name]:
                fix = "Start it with `fewheads serve --trace-endpoint URL`, or send the parameter timings."
                given, expected = list(setting.value), f"{list(self._trace_settings[name])}, as the server was started"
                raise Unsupported(f"trace setting {name!r}", given=given, expected=expected, fix=fix)
        response = pb.TraceSettingResponse()
        for name, value in self._trace_settings.items():
            response.settings[name].value.extend(value)
        return response

    def log_settings(self, request: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        """Change log settings, and return all of them; :class:`edge.instruments.logs.Logs` describes each."""
        if request.settings and not self._allow_log_settings:
            given, expected = Raw("a change of the server's log"), "--allow-log-settings"
            fix = "Start it with `fewheads serve --allow-log-settings`."
            raise Unsupported("LogSettings", given=given, expected=expected, fix=fix)
        kinds = {name: setting.WhichOneof("parameter_choice") for name, setting in request.settings.items()}
        self._logs.change({name: kind and getattr(request.settings[name], kind) for name, kind in kinds.items()})
        response = pb.LogSettingsResponse()
        for name, value in self._logs.settings.items():
            setattr(response.settings[name], _SETTING_FIELDS[type(value)], value)
        return response

    def _allowed(self) -> SharedMemory:
        if self._shared_memory is None:
            raise no_shared_memory("shared memory")
        return self._shared_memory


def _check_repository(name: str) -> None:
    if name:
        fix = "A server has one repository; leave its name out."
        raise Unsupported("repository_name", given=name, expected="none", fix=fix)
