"""All cases, by their subject."""

from __future__ import annotations

from tests.conformance import control, inferences, metadata, shared_memory, streams
from tests.conformance.case import Case

TABLE: dict[str, list[Case]] = {
    "Server and models": metadata.CASES,
    "Inference": inferences.CASES,
    "Streams": streams.CASES,
    "Shared memory": shared_memory.CASES,
    "Model control": control.CASES,
}
