"""Clients for any server of the Open Inference Protocol: NumPy in, NumPy out, blocking or with asyncio."""

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
