"""The caller of an RPC: its name, its token, its deadline."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import grpc

from edge.security.access import CALLER, Access
from edge.security.rate import client_of


def name_caller(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Name the caller by its address, unless its token has named it already."""
    if not CALLER.get():
        CALLER.set(_client(context.peer()))


@lru_cache
def _client(peer: str) -> str:
    """Return the address of a peer from how gRPC writes it."""
    _, _, address = peer.partition(":")
    return client_of(unquote(address).rpartition(":")[0].strip("[]"))


def authorization(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Return the header that holds a caller's token; None if there is none."""
    for name, value in metadata:
        if name == "authorization":
            return value if isinstance(value, str) else ""
    return None


def authorize_again(access: Access | None, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Check that a call that goes on may do so, for its token may have been revoked meanwhile.

    Raises:
        RequestError: as :meth:`edge.security.access.Access.authorize`.
    """
    if access:
        access.authorize(authorization(context.invocation_metadata()), method)
