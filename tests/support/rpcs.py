"""All RPCs of a server, and a request for each."""

from __future__ import annotations

from typing import Any

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from edge.pb import inference_pb2 as pb
from edge.pb import telemetry_pb2
from edge.pb.pool import POOL
from edge.protocol import HEALTH, INFERENCE, REFLECTION, TELEMETRY
from edge.rpc import servicers  # noqa: F401 (it adds health and reflection to the pool)
from tests.support.sample_requests import REGION, good

HEALTH_NAME = health_pb2.HealthCheckRequest(service="")
LIST_SERVICES = reflection_pb2.ServerReflectionRequest(list_services="")
SERVICES = (INFERENCE, TELEMETRY, HEALTH, REFLECTION)
#: Requests that a server with everything on answers; an empty message is one to all others.
REQUESTS: dict[str, Any] = {
    "ModelInfer": good(),
    "ModelStreamInfer": good(),
    "ModelReady": pb.ModelReadyRequest(name="calculator-oracle"),
    "ModelMetadata": pb.ModelMetadataRequest(name="calculator-oracle"),
    "ModelConfig": pb.ModelConfigRequest(name="calculator-oracle"),
    "RepositoryModelLoad": pb.RepositoryModelLoadRequest(model_name="calculator-oracle"),
    "SystemSharedMemoryRegister": REGION,
    "ServerReflectionInfo": LIST_SERVICES,
    "Watch": telemetry_pb2.WatchRequest(interval_ms=100),
}


def methods() -> list[str]:
    found = [POOL.FindServiceByName(service) for service in SERVICES]
    return sorted(f"/{service.full_name}/{method.name}" for service in found for method in service.methods)
