"""Table of the scope that each RPC requires; an RPC that is not in it is denied."""

from __future__ import annotations

from typing import Final

#: What a token may be good for: to ask models, to change what the server does, to read its measurements.
SCOPES: Final = ("infer", "control", "metrics")

_INFERENCE = "/inference.GRPCInferenceService/"
_INFER: Final = frozenset(("infer",))
_CONTROL: Final = frozenset(("control",))
_METRICS: Final = frozenset(("metrics",))
_ANY: Final = frozenset(SCOPES)
#: Asks for no token at all.
OPEN: Final[frozenset[str]] = frozenset()

#: A reading of the telemetry, which is what the pages over HTTP show too.
TELEMETRY_GET: Final = "/fewheads.telemetry.v1.Telemetry/Get"
#: Calls that go on, and whose callers are asked again.
TELEMETRY_WATCH: Final = "/fewheads.telemetry.v1.Telemetry/Watch"
INFER_STREAM: Final = f"{_INFERENCE}ModelStreamInfer"

#: RPC, by its gRPC path, to the scopes of which a caller needs one.
RPC_SCOPES: Final[dict[str, frozenset[str]]] = {
    # Orchestrators and load balancers ask for health, and have no place to keep a token.
    "/grpc.health.v1.Health/Check": OPEN,
    "/grpc.health.v1.Health/Watch": OPEN,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ANY,
    # What there is: whoever may do anything has to find out about it.
    f"{_INFERENCE}ServerLive": _ANY,
    f"{_INFERENCE}ServerReady": _ANY,
    f"{_INFERENCE}ServerMetadata": _ANY,
    f"{_INFERENCE}ModelReady": _ANY,
    f"{_INFERENCE}ModelMetadata": _ANY,
    f"{_INFERENCE}ModelConfig": _ANY,
    f"{_INFERENCE}RepositoryIndex": _ANY,
    f"{_INFERENCE}ModelInfer": _INFER,
    INFER_STREAM: _INFER,
    # perf_analyzer reads the statistics of the model that it asks.
    f"{_INFERENCE}ModelStatistics": _INFER | _METRICS,
    f"{_INFERENCE}RepositoryModelLoad": _CONTROL,
    f"{_INFERENCE}RepositoryModelUnload": _CONTROL,
    # Whoever names regions can have memory of this host read and written.
    f"{_INFERENCE}SystemSharedMemoryStatus": _CONTROL,
    f"{_INFERENCE}SystemSharedMemoryRegister": _CONTROL,
    f"{_INFERENCE}SystemSharedMemoryUnregister": _CONTROL,
    f"{_INFERENCE}CudaSharedMemoryStatus": _CONTROL,
    f"{_INFERENCE}CudaSharedMemoryRegister": _CONTROL,
    f"{_INFERENCE}CudaSharedMemoryUnregister": _CONTROL,
    f"{_INFERENCE}TraceSetting": _CONTROL,
    f"{_INFERENCE}LogSettings": _CONTROL,
    TELEMETRY_GET: _METRICS,
    TELEMETRY_WATCH: _METRICS,
}
