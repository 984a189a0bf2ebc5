"""``fewheads.telemetry.v1.Telemetry``: readings of the server and the device."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from edge.errors import InvalidRequest
from edge.pb import telemetry_pb2
from edge.rpc.methods import authorization
from edge.rpc.parsing import Refused
from edge.security.access import Access
from edge.security.scopes import TELEMETRY_WATCH
from edge.serving.statuses import Code
from edge.serving.streams import DRAINING
from edge.telemetry.telemetry import Telemetry

_MIN_WATCH_MS = 100
_DEFAULT_WATCH_MS = 1000


class TelemetryServicer:
    """``fewheads.telemetry.v1.Telemetry``; watches end once ``draining`` is set.

    ``access`` is checked again before each further reading of a watch.
    """

    def __init__(self, telemetry: Telemetry, access: Access | None, draining: asyncio.Event) -> None:
        self._telemetry, self._access, self._draining = telemetry, access, draining

    async def Get(self, request: telemetry_pb2.GetRequest, context: Any) -> telemetry_pb2.Reading:
        return await asyncio.to_thread(self._telemetry.reading)

    async def Watch(self, request: telemetry_pb2.WatchRequest, context: Any) -> None:
        interval_ms = request.interval_ms or _DEFAULT_WATCH_MS
        if interval_ms < _MIN_WATCH_MS:
            expected, fix = f"at least {_MIN_WATCH_MS}", "0 means once a second."
            raise InvalidRequest("interval_ms", given=interval_ms, expected=expected, fix=fix)
        while True:
            await context.write(await asyncio.to_thread(self._telemetry.reading))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._draining.wait(), interval_ms / 1000)
                raise Refused(Code.UNAVAILABLE, DRAINING)
            if self._access:
                self._access.authorize(authorization(context.invocation_metadata()), TELEMETRY_WATCH)
