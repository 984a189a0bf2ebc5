"""Servers whose models are loaded and unloaded on request, and a client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edge.launch import serving
from edge.server import Ready
from tests.support.sample_requests import column, triton_input

NAME = "changing"
READY, UNAVAILABLE = "READY", "UNAVAILABLE"


@contextmanager
def served(repository: Path, *arguments: str) -> Iterator[tuple[Ready, triton.InferenceServerClient]]:
    cache = repository.parent / "cache"
    with (
        serving(repository, cache=cache, arguments=arguments) as ready,
        triton.InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client,
    ):
        yield ready, client


def explicit(repository: Path, *arguments: str) -> Any:
    return served(repository, "--model-control=explicit", *arguments)


def states(client: triton.InferenceServerClient) -> dict[tuple[str, str], tuple[str, str]]:
    return {(m.name, m.version): (m.state, m.reason) for m in client.get_model_repository_index().models}


def ask(client: triton.InferenceServerClient, name: str = NAME) -> str:
    """Send a request, check the result, and return the version that computed it."""
    result = client.infer(name, [triton_input("expression", column("3 - -4 + 2"))])
    assert result.as_numpy("value")[0, 0] == 9
    return str(result.get_response().model_version)


def is_healthy(ready: Ready, name: str = NAME) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{ready.grpc_port}") as channel:
        status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name)).status
    return bool(status == health_pb2.HealthCheckResponse.SERVING)


def damage(bundle: Path) -> None:
    """Change a byte of the model, as a bad copy does."""
    data = bytearray((bundle / "model.onnx").read_bytes())
    data[-1] ^= 1
    (bundle / "model.onnx").write_bytes(data)
