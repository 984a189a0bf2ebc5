"""The names of the protocol that several parts of the server and its clients write or read."""

from __future__ import annotations

from typing import Final

#: The services, as gRPC names them.
INFERENCE: Final = "inference.GRPCInferenceService"
TELEMETRY: Final = "fewheads.telemetry.v1.Telemetry"
#: The trailer of a refused call: milliseconds after which there may be room.
RETRY_AFTER_MS: Final = "retry-after-ms"
#: The same as a parameter of an answer in a stream, which has no trailer of its own.
STREAM_RETRY_AFTER_MS: Final = "retry_after_ms"
#: The parameter that marks the last answer to a request of a stream.
FINAL_RESPONSE: Final = "triton_final_response"
