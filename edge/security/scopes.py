"""Scopes of bearer tokens, and the table of the scopes that each RPC accepts. An RPC without an entry is denied."""

from __future__ import annotations

from typing import Final

#: ``infer`` sends requests to models, ``control`` changes the server, ``metrics`` reads its measurements.
SCOPES: Final = ("infer", "control", "metrics")

_INFERENCE = "/inference.GRPCInferenceService/"
_INFER: Final = frozenset(("infer",))
_CONTROL: Final = frozenset(("control",))
_METRICS: Final = frozenset(("metrics",))
_ANY: Final = frozenset(SCOPES)
#: The RPC needs no token.
OPEN: Final[frozenset[str]] = frozenset()

TELEMETRY_GET: Final = "/fewheads.telemetry.v1.Telemetry/Get"
#: Long calls, whose callers are authorized again for each message.
TELEMETRY_WATCH: Final = "/fewheads.telemetry.v1.Telemetry/Watch"
INFER_STREAM: Final = f"{_INFERENCE}ModelStreamInfer"

#: gRPC path to scopes; a caller needs one of them.
RPC_SCOPES: Final[dict[str, frozenset[str]]] = {
    # Orchestrators and load balancers check health without a token.
    "/grpc.health.v1.Health/Check": OPEN,
    "/grpc.health.v1.Health/Watch": OPEN,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ANY,
    f"{_INFERENCE}ServerLive": _ANY,
    f"{_INFERENCE}ServerReady": _ANY,
    f"{_INFERENCE}ServerMetadata": _ANY,
    f"{_INFERENCE}ModelReady": _ANY,
    f"{_INFERENCE}ModelMetadata": _ANY,
    f"{_INFERENCE}ModelConfig": _ANY,
    f"{_INFERENCE}RepositoryIndex": _ANY,
    f"{_INFERENCE}ModelInfer": _INFER,
    INFER_STREAM: _INFER,
    # perf_analyzer reads the statistics of the model that it measures.
    f"{_INFERENCE}ModelStatistics": _INFER | _METRICS,
    f"{_INFERENCE}RepositoryModelLoad": _CONTROL,
    f"{_INFERENCE}RepositoryModelUnload": _CONTROL,
    # Regions give access to memory of this host.
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
