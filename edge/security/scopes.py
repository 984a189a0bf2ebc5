"""Scopes of bearer tokens, and the table of the scopes that each RPC accepts. An RPC without an entry is denied."""

from __future__ import annotations

from typing import Final

from edge.protocol import HEALTH, INFERENCE, REFLECTION, TELEMETRY

#: ``infer`` sends requests to models, ``control`` changes the server, ``metrics`` reads its measurements.
SCOPES: Final = ("infer", "control", "metrics")

_INFER: Final = frozenset(("infer",))
_CONTROL: Final = frozenset(("control",))
_METRICS: Final = frozenset(("metrics",))
_ANY: Final = frozenset(SCOPES)
#: The RPC needs no token.
OPEN: Final[frozenset[str]] = frozenset()

TELEMETRY_GET: Final = f"/{TELEMETRY}/Get"
#: Long calls, whose callers are authorized again for each message.
TELEMETRY_WATCH: Final = f"/{TELEMETRY}/Watch"
INFER_STREAM: Final = f"/{INFERENCE}/ModelStreamInfer"


def _all(scopes: frozenset[str], service: str, *methods: str) -> dict[str, frozenset[str]]:
    return {f"/{service}/{method}": scopes for method in methods}


#: gRPC path to scopes; a caller needs one of them.
RPC_SCOPES: Final[dict[str, frozenset[str]]] = {
    # Orchestrators and load balancers check health without a token.
    **_all(OPEN, HEALTH, "Check", "Watch"),
    **_all(_ANY, REFLECTION, "ServerReflectionInfo"),
    **_all(_ANY, INFERENCE, "ServerLive", "ServerReady", "ServerMetadata", "RepositoryIndex"),
    **_all(_ANY, INFERENCE, "ModelReady", "ModelMetadata", "ModelConfig"),
    **_all(_INFER, INFERENCE, "ModelInfer", "ModelStreamInfer"),
    # perf_analyzer reads the statistics of the model that it measures.
    **_all(_INFER | _METRICS, INFERENCE, "ModelStatistics"),
    **_all(_CONTROL, INFERENCE, "RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings"),
    # Regions give access to memory of this host.
    **_all(_CONTROL, INFERENCE, *(f"SystemSharedMemory{verb}" for verb in ("Status", "Register", "Unregister"))),
    **_all(_CONTROL, INFERENCE, *(f"CudaSharedMemory{verb}" for verb in ("Status", "Register", "Unregister"))),
    **_all(_METRICS, TELEMETRY, "Get", "Watch"),
}
