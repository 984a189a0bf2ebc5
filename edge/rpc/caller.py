"""Identity of the caller of an RPC: its token and its address."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import grpc

from edge.security.access import CALLER, Access
from edge.security.rate import client_of


def name_caller(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Set the caller's name to its address, unless its token has set it."""
    if not CALLER.get():
        CALLER.set(_address_of(context.peer()))


@lru_cache
def _address_of(peer: str) -> str:
    _, _, address = peer.partition(":")  # of gRPC's notation, such as ipv6:%5B::1%5D:50051
    return client_of(unquote(address).rpartition(":")[0].strip("[]"))


def authorization(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Return the header with the caller's token; None without one."""
    return next((str(value) for name, value in metadata if name == "authorization"), None)


def authorize_again(access: Access | None, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Check the token of a long-lived call again, in case it has been revoked."""
    if access:
        access.authorize(authorization(context.invocation_metadata()), method)
