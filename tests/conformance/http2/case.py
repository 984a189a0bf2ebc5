"""One conformance case for an HTTP/2 server, and how its outcome is observed."""

from collections.abc import Callable
from inspect import isawaitable
from typing import NamedTuple

from hyperframe.frame import DataFrame

from edge.http2.messages import prefix
from tests.support.http2_client import RawClient

TABLE_SIZE, INITIAL_WINDOW, MAX_FRAME = 1, 4, 5  # identifiers of settings

LIVE = "/inference.GRPCInferenceService/ServerLive"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
#: Responds once and stays open, so that its stream is half-closed (remote).
WATCH = "/grpc.health.v1.Health/Watch"

ERRORS = (
    *("NO_ERROR", "PROTOCOL_ERROR", "INTERNAL_ERROR", "FLOW_CONTROL_ERROR", "SETTINGS_TIMEOUT", "STREAM_CLOSED"),
    *("FRAME_SIZE_ERROR", "REFUSED_STREAM", "CANCEL", "COMPRESSION_ERROR", "CONNECT_ERROR", "ENHANCE_YOUR_CALM"),
)

# Outcomes. After a connection error the connection must close; otherwise it must stay usable.
NO_ERROR = "no error"  # nothing on the stream, and the acknowledgement of a PING
ANSWERED = "grpc-status 0"
CLOSED = "connection closed"
#: GOAWAY with this code, then the end of the connection.
GOAWAY = "GOAWAY {}".format
PROTOCOL, FRAME_SIZE, FLOW_CONTROL, COMPRESSION = (
    GOAWAY(f"{error}_ERROR") for error in ("PROTOCOL", "FRAME_SIZE", "FLOW_CONTROL", "COMPRESSION")
)
#: RST_STREAM with this code.
RESET = "RST_STREAM {}".format
#: The RFC's outcome and this server's differ, and are in DIFFERENCES.md.
DIFFERS = ""


class Case(NamedTuple):
    """The section of an RFC and the client's action as ``name``, and its outcome on stream 1 or ``stream``.

    ``greets`` is whether to send the connection preface first.
    """

    name: str
    outcome: str
    say: Callable
    greets: bool = True
    stream: int = 1

    async def observe(self, port, expected):
        """Run the case on a connection of its own, and return the outcome."""
        async with RawClient(port) as client:
            if self.greets:
                await client.greet().agreed()
            said = self.say(client)
            if isawaitable(said):
                said = await said
            if isinstance(said, str):
                return said
            client.send(*said or ())
            await client.settle(None if expected == NO_ERROR else self.stream)
            return await self._outcome(client)

    async def _outcome(self, client):
        if client.closed or client.goaway is not None:
            code = await client.end()
            if code is not None:
                return GOAWAY(ERRORS[code])
        answer = client.answers.get(self.stream)
        if answer is None or not answer.ended:
            return CLOSED if client.closed else NO_ERROR
        if answer.reset is not None:
            return RESET(ERRORS[answer.reset])
        outcome = f"grpc-status {answer.status}" if answer.status >= 0 else f"HTTP {answer.fields[':status']}"
        return f"{outcome}, {CLOSED}" if client.closed else outcome


def head(client, *flags, stream=1, **changed):
    """HEADERS of a call of ServerLive, without END_STREAM."""
    return client.head(stream, "", *flags, **{"_path": LIVE, **changed})


def body(stream=1, message=b""):
    return DataFrame(stream, prefix(message) + message, flags=["END_STREAM"])


def call(client, stream=1, **changed):
    return [head(client, stream=stream, **changed), body(stream)]


def watch(client):
    """A call that leaves stream 1 half-closed (remote)."""
    return [head(client, _path=WATCH), body()]
