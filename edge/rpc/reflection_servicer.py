"""``grpc.reflection.v1alpha.ServerReflection``: describes the services to tools such as grpcurl."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from edge.pb.pool import POOL
from edge.rpc.methods import read_from


class ReflectionServicer:
    """Describes the services with these names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    async def ServerReflectionInfo(self, _: object, context: Any) -> None:
        async def requests() -> AsyncIterator[Any]:
            while (request := await read_from(context)) is not None:
                yield request

        servicer = await asyncio.to_thread(self._servicer)
        async for response in servicer.ServerReflectionInfo(requests(), context):
            await context.write(response)

    def _servicer(self) -> Any:
        from grpc_reflection.v1alpha import reflection  # imports grpcio, which few servers on nghttp2 ever need

        return reflection.aio.ReflectionServicer(self._names, pool=POOL)
