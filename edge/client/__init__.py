"""Clients for any server of the Open Inference Protocol: NumPy in, NumPy out, blocking or with asyncio.

gRPC is imported when a client class is first used, so that commands that only check their arguments start fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge.client.aio import AsyncClient
    from edge.client.connection import DEFAULT_URL, Credentials
    from edge.client.inference import CallInfo, InferFailure, InferRequest, InferResult, text
    from edge.client.retries import ONCE, Retries
    from edge.client.sync import Client

__all__ = [
    "DEFAULT_URL",
    "ONCE",
    "AsyncClient",
    "CallInfo",
    "Client",
    "Credentials",
    "InferFailure",
    "InferRequest",
    "InferResult",
    "Retries",
    "text",
]
_MODULES = {"AsyncClient": "aio", "Client": "sync", "Credentials": "connection", "DEFAULT_URL": "connection"}
_MODULES |= {"ONCE": "retries", "Retries": "retries"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES.get(name, "inference")
    return getattr(import_module(f"{__name__}.{module}"), name)
