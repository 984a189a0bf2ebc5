"""Clients for any server of the Open Inference Protocol: NumPy in, NumPy out, blocking or with asyncio.

gRPC is imported when a client class is first used, so that commands that only check their arguments stay fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge.client.aio import AsyncClient as AsyncClient
    from edge.client.connection import Credentials as Credentials
    from edge.client.inference import CallInfo as CallInfo
    from edge.client.inference import InferFailure as InferFailure
    from edge.client.inference import InferRequest as InferRequest
    from edge.client.inference import InferResult as InferResult
    from edge.client.inference import text as text
    from edge.client.retries import ONCE as ONCE
    from edge.client.retries import Retries as Retries
    from edge.client.server_pool import DEFAULT_URL as DEFAULT_URL
    from edge.client.sync import Client as Client

_HOMES = {
    "AsyncClient": "aio",
    "CallInfo": "inference",
    "Client": "sync",
    "Credentials": "connection",
    "DEFAULT_URL": "server_pool",
    "InferFailure": "inference",
    "InferRequest": "inference",
    "InferResult": "inference",
    "ONCE": "retries",
    "Retries": "retries",
    "text": "inference",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
