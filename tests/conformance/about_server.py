"""Cases about the server and its models: metadata, configuration, statistics, index, health, settings."""

from __future__ import annotations

from edge.pb import inference_pb2 as pb
from tests.conformance.case import Case
from tests.conformance.peer import SERVICE, Peer, call, empty, flat, infer, mixed, steps, told


def _tensors(response: pb.ModelMetadataResponse) -> str:
    tensors = (*response.inputs, *response.outputs)
    return " ".join(f"{tensor.name}:{tensor.datatype}{list(tensor.shape)}" for tensor in tensors)


def _config(response: pb.ModelConfigResponse) -> str:
    config = response.config
    names = [(tensor.name, pb.DataType.Name(tensor.data_type), list(tensor.dims)) for tensor in config.input]
    return f"{config.name} {config.max_batch_size} {names}"


def _extensions(others: str = "") -> str:
    """Those that both have, and others."""
    both = "binary_tensor_data logging model_configuration model_repository parameters schedule_policy statistics"
    return " ".join(sorted([*both.split(), "system_shared_memory", *others.split()]))


def _versions(response: pb.ModelMetadataResponse) -> str:
    return " ".join(sorted(response.versions))


def _states(peer: Peer, ready: bool = False, names: tuple[str, ...] = ()) -> str:
    request = pb.RepositoryIndexRequest(ready=ready)
    return told(
        lambda: peer.send("RepositoryIndex", request),
        lambda response: " ".join(
            sorted(f"{m.name}/{m.version}={m.state}" for m in response.models if m.name in names or not names)
        ),
    )


def _growth(peer: Peer) -> str:
    def read() -> tuple[int, ...]:
        (found,) = peer.send("ModelStatistics", pb.ModelStatisticsRequest(name="mixed", version="1")).model_stats
        stages = found.inference_stats
        return (
            found.inference_count,
            found.execution_count,
            stages.success.count,
            stages.fail.count,
            stages.queue.count,
            stages.compute_infer.count,
            sum(batch.compute_infer.count for batch in found.batch_stats if batch.batch_size == 3),
        )

    before = read()
    for _ in range(2):
        peer.send("ModelInfer", mixed(3))
    told(lambda: peer.send("ModelInfer", mixed(9)))
    return str([new - old for new, old in zip(read(), before, strict=True)])


def _grows_alike(peer: Peer) -> str:
    """Whether each stage's time is positive and no longer than the whole."""
    peer.send("ModelInfer", mixed())
    (found,) = peer.send("ModelStatistics", pb.ModelStatisticsRequest(name="mixed")).model_stats
    stages = found.inference_stats
    parts = [stages.queue.ns, stages.compute_input.ns, stages.compute_infer.ns, stages.compute_output.ns]
    return f"{all(part > 0 for part in parts)} {sum(parts) <= stages.success.ns} {found.last_inference > 10**12}"


def _log(name: str, **value: object) -> pb.LogSettingsRequest:
    return pb.LogSettingsRequest(settings={name: pb.LogSettingsRequest.SettingValue(**value)})


def _trace(name: str, *value: str, model: str = "") -> pb.TraceSettingRequest:
    settings = {name: pb.TraceSettingRequest.SettingValue(value=value)}
    return pb.TraceSettingRequest(settings=settings, model_name=model)


def _settings(response: pb.LogSettingsResponse | pb.TraceSettingResponse) -> str:
    return " ".join(sorted(response.settings))


CASES = [
    Case("ServerLive", call("ServerLive", view=lambda r: r.live), "OK: True"),
    Case("ServerReady with a broken model", call("ServerReady", view=lambda r: r.ready), "OK: False"),
    Case(
        "ServerMetadata: name and version are there",
        call("ServerMetadata", view=lambda r: bool(r.name and r.version)),
        "OK: True",
    ),
    Case(
        "ServerMetadata: extensions",
        call("ServerMetadata", view=lambda r: " ".join(sorted(r.extensions))),
        f"OK: {_extensions('classification cuda_shared_memory model_repository(unload_dependents) sequence trace')}",
        f"OK: {_extensions()}",
        "It lists what is there and switched on, and nothing else.",
    ),
    Case("ModelReady", call("ModelReady", pb.ModelReadyRequest(name="flat"), lambda r: r.ready), "OK: True"),
    Case(
        "ModelReady, version",
        call("ModelReady", pb.ModelReadyRequest(name="versioned", version="3"), lambda r: r.ready),
        "OK: True",
    ),
    Case(
        "ModelReady, no such version",
        call("ModelReady", pb.ModelReadyRequest(name="flat", version="7"), lambda r: r.ready),
        "OK: False",
    ),
    Case(
        "ModelReady, version abc",
        call("ModelReady", pb.ModelReadyRequest(name="flat", version="abc"), lambda r: r.ready),
        "INVALID_ARGUMENT",
    ),
    Case(
        "ModelReady, unknown model", call("ModelReady", pb.ModelReadyRequest(name="zz"), lambda r: r.ready), "OK: False"
    ),
    Case(
        "ModelReady, broken model",
        call("ModelReady", pb.ModelReadyRequest(name="broken"), lambda r: r.ready),
        "OK: False",
    ),
    Case("ModelReady, empty message", call("ModelReady", view=lambda r: r.ready), "OK: False"),
    Case(
        "ModelMetadata: tensors with a batch",
        call("ModelMetadata", pb.ModelMetadataRequest(name="mixed"), _tensors),
        "OK: real:FP32[-1, 4] whole:INT64[-1, 2] text:BYTES[-1, 1] "
        "real_out:FP32[-1, 4] whole_out:INT64[-1, 2] text_out:BYTES[-1, 1]",
    ),
    Case(
        "ModelMetadata: tensors without",
        call("ModelMetadata", pb.ModelMetadataRequest(name="flat"), _tensors),
        "OK: x:FP32[-1] x_out:FP32[-1]",
    ),
    Case(
        "ModelMetadata: platform",
        call("ModelMetadata", pb.ModelMetadataRequest(name="flat"), lambda r: r.platform),
        "OK: python",
        "OK: onnxruntime_onnx",
        "Another runtime.",
    ),
    Case(
        "ModelMetadata: versions",
        call("ModelMetadata", pb.ModelMetadataRequest(name="versioned"), _versions),
        "OK: 1 3",
    ),
    Case(
        "ModelMetadata: of one version",
        call("ModelMetadata", pb.ModelMetadataRequest(name="versioned", version="3"), _versions),
        "OK: 3",
        "OK: 1 3",
        "The protocol calls them the versions that may be asked for, which are the same whichever is asked about.",
    ),
    Case(
        "ModelMetadata, version 003",
        call("ModelMetadata", pb.ModelMetadataRequest(name="versioned", version="003")),
        "OK",
    ),
    Case(
        "ModelMetadata, version 2",
        call("ModelMetadata", pb.ModelMetadataRequest(name="versioned", version="2")),
        "NOT_FOUND",
    ),
    Case(
        "ModelMetadata, version abc",
        call("ModelMetadata", pb.ModelMetadataRequest(name="flat", version="abc")),
        "INVALID_ARGUMENT",
    ),
    Case(
        "ModelMetadata, version -1",
        call("ModelMetadata", pb.ModelMetadataRequest(name="flat", version="-1")),
        "INVALID_ARGUMENT",
    ),
    Case(
        "ModelMetadata, version of 30 digits",
        call("ModelMetadata", pb.ModelMetadataRequest(name="flat", version="9" * 30)),
        "INVALID_ARGUMENT",
    ),
    Case("ModelMetadata, unknown model", call("ModelMetadata", pb.ModelMetadataRequest(name="zz")), "NOT_FOUND"),
    Case("ModelMetadata, broken model", call("ModelMetadata", pb.ModelMetadataRequest(name="broken")), "NOT_FOUND"),
    Case("ModelMetadata, empty message", call("ModelMetadata"), "NOT_FOUND"),
    Case(
        "ModelConfig",
        call("ModelConfig", pb.ModelConfigRequest(name="mixed"), _config),
        "OK: mixed 8 [('real', 'TYPE_FP32', [4]), ('whole', 'TYPE_INT64', [2]), ('text', 'TYPE_STRING', [1])]",
    ),
    Case(
        "ModelConfig without a batch",
        call("ModelConfig", pb.ModelConfigRequest(name="flat"), _config),
        "OK: flat 0 [('x', 'TYPE_FP32', [-1])]",
    ),
    Case(
        "ModelConfig: backend",
        call("ModelConfig", pb.ModelConfigRequest(name="flat"), lambda r: r.config.backend),
        "OK: python",
        "OK: onnxruntime",
        "Another runtime.",
    ),
    Case(
        "ModelConfig: priorities",
        call("ModelConfig", pb.ModelConfigRequest(name="slow"), lambda r: r.config.dynamic_batching.priority_levels),
        "OK: 10",
    ),
    Case("ModelConfig, unknown model", call("ModelConfig", pb.ModelConfigRequest(name="zz")), "NOT_FOUND"),
    Case(
        "ModelConfig, no such version",
        call("ModelConfig", pb.ModelConfigRequest(name="flat", version="7")),
        "NOT_FOUND",
    ),
    Case("ModelConfig, empty message", call("ModelConfig"), "NOT_FOUND"),
    Case(
        "ModelStatistics: counts after two good requests of three rows and a bad one",
        _growth,
        "[6, 2, 2, 0, 2, 2, 2]",
        "[6, 2, 2, 1, 2, 2, 2]",
        "A refused request is a failed one; Triton counts only what has reached the model.",
    ),
    Case("ModelStatistics: times", _grows_alike, "True True True"),
    Case(
        "ModelStatistics of all models",
        call("ModelStatistics", view=lambda r: " ".join(sorted(f"{m.name}/{m.version}" for m in r.model_stats))),
        "OK: failing/1 flat/1 mixed/1 slow/1 versioned/1 versioned/3",
    ),
    Case(
        "ModelStatistics of all versions",
        call(
            "ModelStatistics",
            pb.ModelStatisticsRequest(name="versioned"),
            lambda r: " ".join(sorted(m.version for m in r.model_stats)),
        ),
        "OK: 1 3",
    ),
    Case(
        "ModelStatistics of one version",
        call(
            "ModelStatistics",
            pb.ModelStatisticsRequest(name="versioned", version="1"),
            lambda r: " ".join(m.version for m in r.model_stats),
        ),
        "OK: 1",
    ),
    Case(
        "ModelStatistics, unknown model",
        call("ModelStatistics", pb.ModelStatisticsRequest(name="zz")),
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "As in every other RPC, Triton's included.",
    ),
    Case(
        "ModelStatistics, no such version",
        call("ModelStatistics", pb.ModelStatisticsRequest(name="flat", version="7")),
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "As in every other RPC, Triton's included.",
    ),
    Case(
        "ModelStatistics, broken model",
        call("ModelStatistics", pb.ModelStatisticsRequest(name="broken")),
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "As in every other RPC, Triton's included.",
    ),
    Case(
        "RepositoryIndex",
        lambda peer: _states(peer, names=("flat", "versioned", "broken")),
        "OK: broken/1=UNAVAILABLE flat/1=READY versioned/1=READY versioned/3=READY",
        "OK: broken/=UNAVAILABLE flat/1=READY versioned/1=READY versioned/3=READY",
        "Of a bundle that breaks its format nothing is believed, its version neither.",
    ),
    Case(
        "RepositoryIndex, ready only",
        lambda peer: _states(peer, ready=True, names=("flat", "broken")),
        "OK: flat/1=READY",
    ),
    Case(
        "RepositoryIndex says why a model is broken",
        call("RepositoryIndex", view=lambda r: bool([m for m in r.models if m.name == "broken" and m.reason])),
        "OK: True",
    ),
    Case(
        "RepositoryIndex, another repository",
        call("RepositoryIndex", pb.RepositoryIndexRequest(repository_name="zz")),
        "UNIMPLEMENTED",
    ),
    Case("health of the server", lambda peer: peer.health(""), "OK: NOT_SERVING"),
    Case("health of the service", lambda peer: peer.health(SERVICE), "OK: NOT_SERVING"),
    Case(
        "health of a model",
        lambda peer: peer.health("flat"),
        "OK: NOT_SERVING",
        "OK: SERVING",
        "Each model has its own; Triton gives the server's for any name, which one broken model makes not ready.",
    ),
    Case(
        "health of an unknown service",
        lambda peer: peer.health("zz"),
        "OK: NOT_SERVING",
        "NOT_FOUND",
        "As gRPC's health protocol says.",
    ),
    Case(
        "LogSettings: names",
        call("LogSettings", view=_settings),
        "OK: log_error log_file log_format log_info log_verbose_level log_warning",
    ),
    Case(
        "LogSettings, verbosity",
        steps(
            call(
                "LogSettings",
                _log("log_verbose_level", uint32_param=1),
                lambda r: r.settings["log_verbose_level"].uint32_param,
            ),
            call(
                "LogSettings",
                _log("log_verbose_level", uint32_param=0),
                lambda r: r.settings["log_verbose_level"].uint32_param,
            ),
        ),
        "OK: 1, OK: 0",
    ),
    Case(
        "LogSettings, a switch",
        steps(
            call("LogSettings", _log("log_info", bool_param=False), lambda r: r.settings["log_info"].bool_param),
            call("LogSettings", _log("log_info", bool_param=True), lambda r: r.settings["log_info"].bool_param),
        ),
        "OK: False, OK: True",
    ),
    Case(
        "LogSettings, format",
        steps(
            call(
                "LogSettings",
                _log("log_format", string_param="ISO8601"),
                lambda r: r.settings["log_format"].string_param,
            ),
            call(
                "LogSettings",
                _log("log_format", string_param="default"),
                lambda r: r.settings["log_format"].string_param,
            ),
        ),
        "OK: ISO8601, OK: default",
    ),
    Case("LogSettings, unknown format", call("LogSettings", _log("log_format", string_param="zz")), "INVALID_ARGUMENT"),
    Case("LogSettings, file", call("LogSettings", _log("log_file", string_param="/proc/zz/log")), "UNIMPLEMENTED"),
    Case(
        "LogSettings, unknown name",
        call("LogSettings", _log("zz", bool_param=True)),
        "OK",
        "INVALID_ARGUMENT",
        "A typing error should not pass for a success.",
    ),
    Case("LogSettings, wrong type", call("LogSettings", _log("log_info", uint32_param=1)), "INVALID_ARGUMENT"),
    Case("LogSettings, no value", call("LogSettings", _log("log_info")), "INVALID_ARGUMENT"),
    Case(
        "TraceSetting: names",
        call("TraceSetting", view=_settings),
        "OK: log_frequency trace_count trace_file trace_level trace_mode trace_rate",
    ),
    Case(
        "TraceSetting: level", call("TraceSetting", view=lambda r: list(r.settings["trace_level"].value)), "OK: ['OFF']"
    ),
    Case(
        "TraceSetting of a model",
        call(
            "TraceSetting", pb.TraceSettingRequest(model_name="flat"), lambda r: list(r.settings["trace_level"].value)
        ),
        "OK: ['OFF']",
    ),
    Case(
        "TraceSetting, unknown model",
        call("TraceSetting", pb.TraceSettingRequest(model_name="zz")),
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "As in every other RPC, Triton's included.",
    ),
    Case(
        "TraceSetting, unknown name",
        call("TraceSetting", _trace("zz", "1")),
        "OK",
        "INVALID_ARGUMENT",
        "A typing error should not pass for a success.",
    ),
    Case("TraceSetting, level as it is", call("TraceSetting", _trace("trace_level", "OFF")), "OK"),
    Case("TraceSetting, cleared", call("TraceSetting", _trace("trace_level")), "OK"),
    Case(
        "TraceSetting, unknown level",
        call("TraceSetting", _trace("trace_level", "zz")),
        "OK",
        "UNIMPLEMENTED",
        "Tracing is set where the server is started.",
    ),
    Case(
        "TraceSetting, rate that is no number",
        call("TraceSetting", _trace("trace_rate", "zz")),
        "INVALID_ARGUMENT",
        "UNIMPLEMENTED",
        "Tracing is set where the server is started.",
    ),
    Case(
        "TraceSetting, on",
        steps(
            call("TraceSetting", _trace("trace_level", "TIMESTAMPS", model="flat")),
            infer(flat()),
            call("TraceSetting", _trace("trace_level", model="flat")),
        ),
        "INVALID_ARGUMENT, OK, OK",
        "UNIMPLEMENTED, OK, OK",
        "Tracing is set where the server is started; Triton wants a file first.",
    ),
    Case("an unknown method", call("Zz"), "UNIMPLEMENTED"),
    *(
        Case(f"{method}, a message that is none", call(method, b"\xff\xff\xff"), "INTERNAL")
        for method in ("ServerLive", "ModelMetadata", "ModelStatistics", "RepositoryIndex", "LogSettings")
    ),
    Case("ServerLive, unknown fields", call("ServerLive", b"\xa2\x06\x02hi", lambda r: r.live), "OK: True"),
    Case(
        "empty messages all around",
        steps(
            *(
                call(method, empty(method))
                for method in (
                    "ServerLive",
                    "ServerReady",
                    "ServerMetadata",
                    "RepositoryIndex",
                    "LogSettings",
                    "TraceSetting",
                    "SystemSharedMemoryStatus",
                    "CudaSharedMemoryStatus",
                )
            )
        ),
        "OK, OK, OK, OK, OK, OK, OK, OK",
    ),
]
