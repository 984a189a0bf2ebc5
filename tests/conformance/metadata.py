"""Cases about the server and its models: metadata, configuration, statistics, index, health, settings."""

from functools import partial

from edge.pb import inference_pb2 as pb
from tests.conformance.peer import SERVICE, Case, call, flat, infer, mixed, outcome, steps


def _of(method, name="", version="", view=None):
    return call(method, view=view, name=name, version=version)


ready = partial(_of, "ModelReady", view=lambda r: r.ready)
metadata, config = partial(_of, "ModelMetadata"), partial(_of, "ModelConfig")
statistics = partial(_of, "ModelStatistics", view=lambda r: _sorted(f"{m.name}/{m.version}" for m in r.model_stats))


def _sorted(words):
    return " ".join(sorted(words))


def log(name, view=None, **value):
    return call("LogSettings", view=view, settings={name: pb.LogSettingsRequest.SettingValue(**value)})


def logged(name, kind, *values):
    """Change a setting to each value in turn, and return what it was changed to."""
    return steps(*(log(name, lambda r: getattr(r.settings[name], kind), **{kind: value}) for value in values))


def trace(name, *value, model=""):
    return call("TraceSetting", settings={name: pb.TraceSettingRequest.SettingValue(value=value)}, model_name=model)


def tensors(response):
    found = (*response.inputs, *response.outputs)
    return " ".join(f"{tensor.name}:{tensor.datatype}{list(tensor.shape)}" for tensor in found)


def dims(response):
    found = response.config
    names = [(tensor.name, pb.DataType.Name(tensor.data_type), list(tensor.dims)) for tensor in found.input]
    return f"{found.name} {found.max_batch_size} {names}"


def states(*names, ready=False):
    def view(response):
        return _sorted(f"{m.name}/{m.version}={m.state}" for m in response.models if m.name in names)

    return call("RepositoryIndex", view=view, ready=ready)


def growth(peer):
    """Growth of the counters by two good requests of three rows and a bad one."""

    def read():
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


def times(peer):
    """Whether each stage's time is positive, their sum at most the whole, and the last inference in milliseconds."""
    peer.send("ModelInfer", mixed())
    (found,) = peer.send("ModelStatistics", pb.ModelStatisticsRequest(name="mixed")).model_stats
    stages = found.inference_stats
    parts = [stages.queue.ns, stages.compute_input.ns, stages.compute_infer.ns, stages.compute_output.ns]
    return f"{all(part > 0 for part in parts)} {sum(parts) <= stages.success.ns} {found.last_inference > 10**12}"


def names(response):
    return _sorted(response.settings)


ON = steps(trace("trace_level", "TIMESTAMPS", model="flat"), infer(flat()), trace("trace_level", model="flat"))
NOT_FOUND, INVALID = "NOT_FOUND", "INVALID_ARGUMENT"
_ENDS = "real{}:FP32[-1, 4] whole{}:INT64[-1, 2] text{}:BYTES[-1, 1]"
_TENSORS = f"OK: {_ENDS.format('', '', '')} {_ENDS.format(*['_out'] * 3)}"
_CONFIG = "OK: mixed 8 [('real', 'TYPE_FP32', [4]), ('whole', 'TYPE_INT64', [2]), ('text', 'TYPE_STRING', [1])]"
_LOG_NAMES = "OK: log_error log_file log_format log_info log_verbose_level log_warning"
_TRACE_NAMES = "OK: log_frequency trace_count trace_file trace_level trace_mode trace_rate"
_REASONS = call("RepositoryIndex", view=lambda r: bool([m for m in r.models if m.name == "broken" and m.reason]))
_LEVEL = call("TraceSetting", view=lambda r: list(r.settings["trace_level"].value), model_name="flat")
CASES = [
    Case("ServerLive", call("ServerLive", view=lambda r: r.live), "OK: True"),
    Case("ServerReady with a broken model", call("ServerReady", view=lambda r: r.ready), "OK: False"),
    Case("ServerMetadata: version", call("ServerMetadata", view=lambda r: bool(r.name and r.version)), "OK: True"),
    Case("ServerMetadata: extensions", call("ServerMetadata", view=lambda r: " ".join(sorted(r.extensions)))),
    Case("ModelReady, version", ready("versioned", "3"), "OK: True"),
    Case("ModelReady, no such version", ready("flat", "7"), "OK: False"),
    Case("ModelReady, version abc", ready("flat", "abc"), INVALID, "'abc'"),
    Case("ModelReady, unknown model", ready("zz"), "OK: False"),
    Case("ModelReady, broken model", ready("broken"), "OK: False"),
    Case("ModelMetadata: tensors with a batch", metadata("mixed", view=tensors), _TENSORS),
    Case("ModelMetadata: tensors without", metadata("flat", view=tensors), "OK: x:FP32[-1] x_out:FP32[-1]"),
    Case("ModelMetadata: platform", metadata("flat", view=lambda r: r.platform)),
    Case("ModelMetadata: versions", metadata("versioned", view=lambda r: _sorted(r.versions)), "OK: 1 3"),
    Case("ModelMetadata: of one version", metadata("versioned", "3", lambda r: _sorted(r.versions))),
    Case("ModelMetadata, version 003", metadata("versioned", "003"), "OK"),
    Case("ModelMetadata, version 2", metadata("versioned", "2"), NOT_FOUND, "1, 3"),
    Case("ModelMetadata, version -1", metadata("flat", "-1"), INVALID, "positive integer"),
    Case("ModelMetadata, unknown model", metadata("zz"), NOT_FOUND, "model 'zz'"),
    Case("ModelConfig", config("mixed", view=dims), _CONFIG),
    Case("ModelConfig without a batch", config("flat", view=dims), "OK: flat 0 [('x', 'TYPE_FP32', [-1])]"),
    Case("ModelConfig: backend", config("flat", view=lambda r: r.config.backend)),
    Case("ModelConfig: priorities", config("slow", view=lambda r: r.config.dynamic_batching.priority_levels), "OK: 10"),
    Case("ModelConfig, no such version", config("flat", "7"), NOT_FOUND, "one of: 1"),
    Case("ModelStatistics: counts after two good requests of three rows and a bad one", growth),
    Case("ModelStatistics: times", times, "True True True"),
    Case("ModelStatistics of all models", statistics(), "OK: failing/1 flat/1 mixed/1 slow/1 versioned/1 versioned/3"),
    Case("ModelStatistics of all versions", statistics("versioned"), "OK: versioned/1 versioned/3"),
    Case("ModelStatistics of one version", statistics("versioned", "1"), "OK: versioned/1"),
    Case("ModelStatistics, unknown model", statistics("zz"), text="'zz'"),
    Case("ModelStatistics, no such version", statistics("flat", "7")),
    Case("ModelStatistics, broken model", statistics("broken")),
    Case("RepositoryIndex", states("flat", "versioned", "broken")),
    Case("RepositoryIndex, ready only", states("flat", "broken", ready=True), "OK: flat/1=READY"),
    Case("RepositoryIndex says why a model is broken", _REASONS, "OK: True"),
    Case("RepositoryIndex, elsewhere", call("RepositoryIndex", repository_name="z"), "UNIMPLEMENTED", "one repository"),
    Case("health of the server", lambda peer: peer.health(""), "OK: NOT_SERVING"),
    Case("health of the service", lambda peer: peer.health(SERVICE), "OK: NOT_SERVING"),
    Case("health of a model", lambda peer: peer.health("flat")),
    Case("health of an unknown service", lambda peer: peer.health("zz")),
    Case("LogSettings: names", call("LogSettings", view=names), _LOG_NAMES),
    Case("LogSettings, verbosity", logged("log_verbose_level", "uint32_param", 1, 0), "OK: 1, OK: 0"),
    Case("LogSettings, a switch", logged("log_info", "bool_param", False, True), "OK: False, OK: True"),
    Case("LogSettings, format", logged("log_format", "string_param", "ISO8601", "default"), "OK: ISO8601, OK: default"),
    Case("LogSettings, unknown format", log("log_format", string_param="zz"), INVALID, "ISO8601"),
    Case("LogSettings, file", log("log_file", string_param="/proc/zz/log"), "UNIMPLEMENTED", "stderr"),
    Case("LogSettings, unknown name", log("zz", bool_param=True), text="'zz'"),
    Case("LogSettings, wrong type", log("log_info", uint32_param=1), INVALID, "type bool"),
    Case("LogSettings, no value", log("log_info"), INVALID, "no value"),
    Case("TraceSetting: names", call("TraceSetting", view=names), _TRACE_NAMES),
    Case("TraceSetting of a model", _LEVEL, "OK: ['OFF']"),
    Case("TraceSetting, unknown model", call("TraceSetting", model_name="zz"), text="'zz'"),
    Case("TraceSetting, unknown name", trace("zz", "1"), text="'zz'"),
    Case("TraceSetting, level as it is", trace("trace_level", "OFF"), "OK"),
    Case("TraceSetting, cleared", trace("trace_level"), "OK"),
    Case("TraceSetting, unknown level", trace("trace_level", "zz")),
    Case("TraceSetting, rate that is no number", trace("trace_rate", "zz")),
    Case("TraceSetting, on", ON, text="--trace-endpoint"),
    Case("an unknown method", call("Zz"), "UNIMPLEMENTED"),
    Case("ModelMetadata, a message that is none", call("ModelMetadata", b"\xff\xff\xff"), "INTERNAL", "do not parse"),
    Case("ServerLive, unknown fields", call("ServerLive", b"\xa2\x06\x02hi", lambda r: r.live), "OK: True"),
]
