"""Good and bad requests to the models of the shared server."""

from queue import Queue

import numpy as np
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tritonclient.utils import np_to_triton_dtype

from edge.bundles.expression import evaluate, tokenize
from edge.datatypes import datatype_of
from edge.pb import inference_pb2 as pb
from edge.pb import telemetry_pb2
from edge.pb.pool import POOL
from edge.protocol import HEALTH, INFERENCE, REFLECTION, TELEMETRY
from edge.rpc import servicers  # noqa: F401 (it adds health and reflection to the pool)
from edge.serving.wire import to_raw
from tests.support.models import ORACLE

TOKENS = tokenize(["3 - -4 + 2"])
TEXTS = ["3 - -4 + 2", "-5 + 1", "7", "1 - 2 + 3 - 4 + 5 - 6 + 7 - 8"]
TRUTH = np.array([[evaluate(text)] for text in TEXTS], np.float32)


def raw_request(model, *, version="", identity="", **inputs):
    """A request with arrays by the names of their inputs, in raw contents."""
    request = pb.ModelInferRequest(model_name=model, model_version=version, id=identity)
    for name, array in inputs.items():
        datatype = datatype_of(array)
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(to_raw(array, datatype))
    return request


def good(rows=1):
    return raw_request(ORACLE, x=np.repeat(TOKENS, rows, axis=0))


def in_region(tensor, name, size_bytes, offset=None):
    tensor.parameters["shared_memory_region"].string_param = name
    tensor.parameters["shared_memory_byte_size"].int64_param = size_bytes
    if offset is not None:
        tensor.parameters["shared_memory_offset"].int64_param = offset


def triton_input(name, values, module=triton, **how):
    """An input of a stock client, the one over gRPC by default."""
    tensor = module.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
    return tensor.set_data_from_numpy(values, **how)


def column(*texts):
    return np.array([[text.encode() if isinstance(text, str) else text] for text in texts], np.object_)


def typed():
    request = good()
    del request.raw_input_contents[:]
    request.inputs[0].contents.fp32_contents.extend(TOKENS[0].tolist())
    return request


def changed(change, start=good):
    request = start()
    change(request)
    return request


def reshaped(request, *shape, index=0):
    """Give an input of a request another shape."""
    request.inputs[index].ClearField("shape")
    request.inputs[index].shape.extend(shape)
    return request


def shaped(*shape):
    return reshaped(good(), *shape)


def parameter(name, **value):
    return changed(lambda r: r.parameters[name].MergeFrom(pb.InferParameter(**value)))


def expression(*elements):
    return raw_request(ORACLE, expression=column(*elements))


def _text(value):
    return pb.InferParameter(string_param=value)


def log_setting(name, **value):
    return pb.LogSettingsRequest(settings={name: pb.LogSettingsRequest.SettingValue(**value)})


def trace_setting(name, *value):
    return pb.TraceSettingRequest(settings={name: pb.TraceSettingRequest.SettingValue(value=value)})


LOAD = pb.RepositoryModelLoadRequest(model_name=ORACLE)
UNLOAD = pb.RepositoryModelUnloadRequest(model_name=ORACLE)
REGION = pb.SystemSharedMemoryRegisterRequest(name="a", key="/a", byte_size=1)
CUDA_REGION = pb.CudaSharedMemoryRegisterRequest(name="a")


def text(*words, **parameters):
    return with_parameters(raw_request("sentiment", text=column(*words)), parameters)


def with_parameters(request, parameters):
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return request


#: Messages that the fuzzers mutate, by method.
SEEDS = {
    method: [message.SerializeToString() for message in messages]
    for method, messages in {
        "ModelInfer": [
            *(good(), good(65), typed(), expression(b"3 - -4 + 2"), reshaped(expression(b"1", b"2"), 1, 1)),
            *(shaped(-1, 15), shaped(2**62, 15), expression(b"\xff"), parameter("teir")),
            parameter("timeout", int64_param=-1),
            *(changed(lambda r: r.outputs.add(name="value")), parameter("sequence_id", uint64_param=7)),
            changed(lambda r: r.inputs[0].contents.fp32_contents.extend(TOKENS[0].tolist())),
            changed(lambda r: r.inputs[0].parameters["shared_memory_region"].MergeFrom(_text("a"))),
            changed(lambda r: r.outputs.add(name="value").parameters["shared_memory_region"].MergeFrom(_text("a"))),
            *(changed(lambda r, v=v: setattr(r, "model_version", v)) for v in ("abc", "0", "9" * 5000, "²")),
        ],
        "RepositoryModelLoad": [LOAD],
        "RepositoryModelUnload": [UNLOAD],
        "RepositoryIndex": [pb.RepositoryIndexRequest(ready=True)],
        "SystemSharedMemoryStatus": [pb.SystemSharedMemoryStatusRequest(name="a")],
        "SystemSharedMemoryRegister": [REGION],
        "SystemSharedMemoryUnregister": [pb.SystemSharedMemoryUnregisterRequest(name="a")],
        "CudaSharedMemoryStatus": [pb.CudaSharedMemoryStatusRequest(name="a")],
        "CudaSharedMemoryRegister": [CUDA_REGION],
        "CudaSharedMemoryUnregister": [pb.CudaSharedMemoryUnregisterRequest(name="a")],
        "TraceSetting": [trace_setting("trace_level", "OFF"), pb.TraceSettingRequest(model_name=ORACLE)],
        "LogSettings": [log_setting("log_info", bool_param=True), log_setting("log_format", string_param="zz")],
    }.items()
}


class Sender:
    """The requests of a stream that stays open until None is put into the queue."""

    def __init__(self):
        self.queue = Queue()

    def __iter__(self):
        return iter(self.queue.get, None)


HEALTH_NAME = health_pb2.HealthCheckRequest(service="")
LIST_SERVICES = reflection_pb2.ServerReflectionRequest(list_services="")
SERVICES = (INFERENCE, TELEMETRY, HEALTH, REFLECTION)
#: Requests that a server with everything on answers; an empty message is one to all others.
REQUESTS = {
    "ModelInfer": good(),
    "ModelStreamInfer": good(),
    "ModelReady": pb.ModelReadyRequest(name=ORACLE),
    "ModelMetadata": pb.ModelMetadataRequest(name=ORACLE),
    "ModelConfig": pb.ModelConfigRequest(name=ORACLE),
    "RepositoryModelLoad": LOAD,
    "SystemSharedMemoryRegister": REGION,
    "ServerReflectionInfo": LIST_SERVICES,
    "Watch": telemetry_pb2.WatchRequest(interval_ms=100),
}


def methods():
    found = [POOL.FindServiceByName(service) for service in SERVICES]
    return sorted(f"/{service.full_name}/{method.name}" for service in found for method in service.methods)
