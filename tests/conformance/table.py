"""All cases, by what they are about."""

from __future__ import annotations

from tests.conformance import about_server, control, inferences, shared_memory, streams
from tests.conformance.case import Case

TABLE: dict[str, list[Case]] = {
    "Server and models": about_server.CASES,
    "Inference": inferences.CASES,
    "Streams": streams.CASES,
    "Shared memory": shared_memory.CASES,
    "Model control": control.CASES,
}
