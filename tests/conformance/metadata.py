"""Cases about the server and its models: metadata, configuration, statistics, index, health, settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edge.pb import inference_pb2 as pb
from tests.conformance.case import AS_ELSEWHERE, NO_TYPING_ERROR, OTHER_RUNTIME, STARTED_SO, Case
from tests.conformance.peer import SERVICE, Action, Peer, call, flat, infer, mixed, outcome, steps

View = Callable[[Any], object]


def ready(name: str, version: str = "") -> Action:
    return call("ModelReady", pb.ModelReadyRequest(name=name, version=version), lambda r: r.ready)


def metadata(name: str, version: str = "", view: View | None = None) -> Action:
    return call("ModelMetadata", pb.ModelMetadataRequest(name=name, version=version), view)


def config(name: str, version: str = "", view: View | None = None) -> Action:
    return call("ModelConfig", pb.ModelConfigRequest(name=name, version=version), view)


def statistics(name: str = "", version: str = "") -> Action:
    request = pb.ModelStatisticsRequest(name=name, version=version)
    return call("ModelStatistics", request, lambda r: " ".join(sorted(f"{m.name}/{m.version}" for m in r.model_stats)))


def log(name: str, view: View | None = None, **value: object) -> Action:
    settings = {name: pb.LogSettingsRequest.SettingValue(**value)}
    return call("LogSettings", pb.LogSettingsRequest(settings=settings), view)


def logged(name: str, kind: str, *values: object) -> Action:
    """Change a setting to each value in turn, and return what it was changed to."""
    return steps(*(log(name, lambda r: getattr(r.settings[name], kind), **{kind: value}) for value in values))


def trace(name: str, *value: str, model: str = "") -> Action:
    settings = {name: pb.TraceSettingRequest.SettingValue(value=value)}
    return call("TraceSetting", pb.TraceSettingRequest(settings=settings, model_name=model))


def tensors(response: pb.ModelMetadataResponse) -> str:
    found = (*response.inputs, *response.outputs)
    return " ".join(f"{tensor.name}:{tensor.datatype}{list(tensor.shape)}" for tensor in found)


def dims(response: pb.ModelConfigResponse) -> str:
    found = response.config
    names = [(tensor.name, pb.DataType.Name(tensor.data_type), list(tensor.dims)) for tensor in found.input]
    return f"{found.name} {found.max_batch_size} {names}"


def extensions(others: str = "") -> str:
    """The extensions that both servers have, and others."""
    both = "binary_tensor_data logging model_configuration model_repository parameters schedule_policy statistics"
    return " ".join(sorted([*both.split(), "system_shared_memory", *others.split()]))


def versions(response: pb.ModelMetadataResponse) -> str:
    return " ".join(sorted(response.versions))


def states(*names: str, ready: bool = False) -> Action:
    def view(response: pb.RepositoryIndexResponse) -> str:
        return " ".join(sorted(f"{m.name}/{m.version}={m.state}" for m in response.models if m.name in names))

    return call("RepositoryIndex", pb.RepositoryIndexRequest(ready=ready), view)


def growth(peer: Peer) -> str:
    """Growth of the counters by two good requests of three rows and a bad one."""

    def read() -> tuple[int, ...]:
        (found,) = peer.send("ModelStatistics", pb.ModelStatisticsRequest(name="mixed", version="1")).model_stats
        stages = found.inference_stats
        return (
            *(found.inference_count, found.execution_count, stages.success.count, stages.fail.count),
            *(stages.queue.count, stages.compute_infer.count),
            sum(batch.compute_infer.count for batch in found.batch_stats if batch.batch_size == 3),
        )

    before = read()
    for _ in range(2):
        peer.send("ModelInfer", mixed(3))
    outcome(lambda: peer.send("ModelInfer", mixed(9)))
    return str([new - old for new, old in zip(read(), before, strict=True)])


def times(peer: Peer) -> str:
    """Whether each stage's time is positive, their sum at most the whole, and the last inference in milliseconds."""
    peer.send("ModelInfer", mixed())
    (found,) = peer.send("ModelStatistics", pb.ModelStatisticsRequest(name="mixed")).model_stats
    stages = found.inference_stats
    parts = [stages.queue.ns, stages.compute_input.ns, stages.compute_infer.ns, stages.compute_output.ns]
    return f"{all(part > 0 for part in parts)} {sum(parts) <= stages.success.ns} {found.last_inference > 10**12}"


def names(response: pb.LogSettingsResponse | pb.TraceSettingResponse) -> str:
    return " ".join(sorted(response.settings))


def level(response: pb.TraceSettingResponse) -> list[str]:
    return list(response.settings["trace_level"].value)


NOT_FOUND, INVALID = "NOT_FOUND", "INVALID_ARGUMENT"
CASES = [
    Case("ServerLive", call("ServerLive", view=lambda r: r.live), "OK: True"),
    Case("ServerReady with a broken model", call("ServerReady", view=lambda r: r.ready), "OK: False"),
    Case(
        "ServerMetadata: name and version",
        call("ServerMetadata", view=lambda r: bool(r.name and r.version)),
        "OK: True",
    ),
    Case(
        "ServerMetadata: extensions",
        call("ServerMetadata", view=lambda r: " ".join(sorted(r.extensions))),
        f"OK: {extensions('classification cuda_shared_memory model_repository(unload_dependents) sequence trace')}",
        f"OK: {extensions()}",
        "It lists what is there and switched on, and nothing else.",
    ),
    Case("ModelReady", ready("flat"), "OK: True"),
    Case("ModelReady, version", ready("versioned", "3"), "OK: True"),
    Case("ModelReady, no such version", ready("flat", "7"), "OK: False"),
    Case("ModelReady, version abc", ready("flat", "abc"), INVALID, text="'abc'"),
    Case("ModelReady, unknown model", ready("zz"), "OK: False"),
    Case("ModelReady, broken model", ready("broken"), "OK: False"),
    Case("ModelReady, empty message", call("ModelReady", view=lambda r: r.ready), "OK: False"),
    Case(
        "ModelMetadata: tensors with a batch",
        metadata("mixed", view=tensors),
        "OK: real:FP32[-1, 4] whole:INT64[-1, 2] text:BYTES[-1, 1] "
        "real_out:FP32[-1, 4] whole_out:INT64[-1, 2] text_out:BYTES[-1, 1]",
    ),
    Case("ModelMetadata: tensors without", metadata("flat", view=tensors), "OK: x:FP32[-1] x_out:FP32[-1]"),
    Case(
        "ModelMetadata: platform",
        metadata("flat", view=lambda r: r.platform),
        "OK: python",
        "OK: onnxruntime_onnx",
        OTHER_RUNTIME,
    ),
    Case("ModelMetadata: versions", metadata("versioned", view=versions), "OK: 1 3"),
    Case(
        "ModelMetadata: of one version",
        metadata("versioned", "3", versions),
        "OK: 3",
        "OK: 1 3",
        "The protocol calls them the versions that may be requested, which are the same for each version.",
    ),
    Case("ModelMetadata, version 003", metadata("versioned", "003"), "OK"),
    Case("ModelMetadata, version 2", metadata("versioned", "2"), NOT_FOUND, text="1, 3"),
    Case("ModelMetadata, version abc", metadata("flat", "abc"), INVALID, text="'abc'"),
    Case("ModelMetadata, version -1", metadata("flat", "-1"), INVALID, text="positive integer"),
    Case("ModelMetadata, version of 30 digits", metadata("flat", "9" * 30), INVALID),
    Case("ModelMetadata, unknown model", metadata("zz"), NOT_FOUND, text="model 'zz'"),
    Case("ModelMetadata, broken model", metadata("broken"), NOT_FOUND),
    Case("ModelMetadata, empty message", call("ModelMetadata"), NOT_FOUND, text="model ''"),
    Case(
        "ModelConfig",
        config("mixed", view=dims),
        "OK: mixed 8 [('real', 'TYPE_FP32', [4]), ('whole', 'TYPE_INT64', [2]), ('text', 'TYPE_STRING', [1])]",
    ),
    Case("ModelConfig without a batch", config("flat", view=dims), "OK: flat 0 [('x', 'TYPE_FP32', [-1])]"),
    Case(
        "ModelConfig: backend",
        config("flat", view=lambda r: r.config.backend),
        "OK: python",
        "OK: onnxruntime",
        OTHER_RUNTIME,
    ),
    Case("ModelConfig: priorities", config("slow", view=lambda r: r.config.dynamic_batching.priority_levels), "OK: 10"),
    Case("ModelConfig, unknown model", config("zz"), NOT_FOUND, text="model 'zz'"),
    Case("ModelConfig, no such version", config("flat", "7"), NOT_FOUND, text="one of: 1"),
    Case("ModelConfig, empty message", call("ModelConfig"), NOT_FOUND),
    Case(
        "ModelStatistics: counts after two good requests of three rows and a bad one",
        growth,
        "[6, 2, 2, 0, 2, 2, 2]",
        "[6, 2, 2, 1, 2, 2, 2]",
        "A refused request is a failed one; Triton counts only requests that reach the model.",
    ),
    Case("ModelStatistics: times", times, "True True True"),
    Case("ModelStatistics of all models", statistics(), "OK: failing/1 flat/1 mixed/1 slow/1 versioned/1 versioned/3"),
    Case("ModelStatistics of all versions", statistics("versioned"), "OK: versioned/1 versioned/3"),
    Case("ModelStatistics of one version", statistics("versioned", "1"), "OK: versioned/1"),
    Case("ModelStatistics, unknown model", statistics("zz"), INVALID, NOT_FOUND, AS_ELSEWHERE, "'zz'"),
    Case("ModelStatistics, no such version", statistics("flat", "7"), INVALID, NOT_FOUND, AS_ELSEWHERE),
    Case("ModelStatistics, broken model", statistics("broken"), INVALID, NOT_FOUND, AS_ELSEWHERE),
    Case(
        "RepositoryIndex",
        states("flat", "versioned", "broken"),
        "OK: broken/1=UNAVAILABLE flat/1=READY versioned/1=READY versioned/3=READY",
        "OK: broken/=UNAVAILABLE flat/1=READY versioned/1=READY versioned/3=READY",
        "The version of a bundle that breaks its format is not trusted.",
    ),
    Case("RepositoryIndex, ready only", states("flat", "broken", ready=True), "OK: flat/1=READY"),
    Case(
        "RepositoryIndex says why a model is broken",
        call("RepositoryIndex", view=lambda r: bool([m for m in r.models if m.name == "broken" and m.reason])),
        "OK: True",
    ),
    Case(
        "RepositoryIndex, another repository",
        call("RepositoryIndex", pb.RepositoryIndexRequest(repository_name="zz")),
        "UNIMPLEMENTED",
        text="one repository",
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
        NOT_FOUND,
        "As gRPC's health protocol says.",
    ),
    Case(
        "LogSettings: names",
        call("LogSettings", view=names),
        "OK: log_error log_file log_format log_info log_verbose_level log_warning",
    ),
    Case("LogSettings, verbosity", logged("log_verbose_level", "uint32_param", 1, 0), "OK: 1, OK: 0"),
    Case("LogSettings, a switch", logged("log_info", "bool_param", False, True), "OK: False, OK: True"),
    Case("LogSettings, format", logged("log_format", "string_param", "ISO8601", "default"), "OK: ISO8601, OK: default"),
    Case("LogSettings, unknown format", log("log_format", string_param="zz"), INVALID, text="ISO8601"),
    Case("LogSettings, file", log("log_file", string_param="/proc/zz/log"), "UNIMPLEMENTED", text="stderr"),
    Case("LogSettings, unknown name", log("zz", bool_param=True), "OK", INVALID, NO_TYPING_ERROR, "'zz'"),
    Case("LogSettings, wrong type", log("log_info", uint32_param=1), INVALID, text="type bool"),
    Case("LogSettings, no value", log("log_info"), INVALID, text="no value"),
    Case(
        "TraceSetting: names",
        call("TraceSetting", view=names),
        "OK: log_frequency trace_count trace_file trace_level trace_mode trace_rate",
    ),
    Case("TraceSetting: level", call("TraceSetting", view=level), "OK: ['OFF']"),
    Case(
        "TraceSetting of a model", call("TraceSetting", pb.TraceSettingRequest(model_name="flat"), level), "OK: ['OFF']"
    ),
    Case(
        "TraceSetting, unknown model",
        call("TraceSetting", pb.TraceSettingRequest(model_name="zz")),
        INVALID,
        NOT_FOUND,
        AS_ELSEWHERE,
        "'zz'",
    ),
    Case("TraceSetting, unknown name", trace("zz", "1"), "OK", INVALID, NO_TYPING_ERROR, "'zz'"),
    Case("TraceSetting, level as it is", trace("trace_level", "OFF"), "OK"),
    Case("TraceSetting, cleared", trace("trace_level"), "OK"),
    Case("TraceSetting, unknown level", trace("trace_level", "zz"), "OK", "UNIMPLEMENTED", STARTED_SO),
    Case("TraceSetting, rate that is no number", trace("trace_rate", "zz"), INVALID, "UNIMPLEMENTED", STARTED_SO),
    Case(
        "TraceSetting, on",
        steps(trace("trace_level", "TIMESTAMPS", model="flat"), infer(flat()), trace("trace_level", model="flat")),
        f"{INVALID}, OK, OK",
        "UNIMPLEMENTED, OK, OK",
        f"{STARTED_SO[:-1]}; Triton wants a file first.",
        "--trace-endpoint",
    ),
    Case("an unknown method", call("Zz"), "UNIMPLEMENTED"),
    *(
        Case(f"{method}, a message that is none", call(method, b"\xff\xff\xff"), "INTERNAL", text="do not parse")
        for method in ("ServerLive", "ModelMetadata", "ModelStatistics", "RepositoryIndex", "LogSettings")
    ),
    Case("ServerLive, unknown fields", call("ServerLive", b"\xa2\x06\x02hi", lambda r: r.live), "OK: True"),
]
