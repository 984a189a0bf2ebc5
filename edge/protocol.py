"""Names of the protocol that several parts of the server and its clients use."""

from __future__ import annotations

from typing import Final

#: Full names of the services.
INFERENCE: Final = "inference.GRPCInferenceService"
TELEMETRY: Final = "fewheads.telemetry.v1.Telemetry"
HEALTH: Final = "grpc.health.v1.Health"
REFLECTION: Final = "grpc.reflection.v1alpha.ServerReflection"
#: The trailer of a refused call with the milliseconds until a retry may succeed.
RETRY_AFTER_MS: Final = "retry-after-ms"
#: The same for the retries of gRPC itself (gRFC A6).
RETRY_PUSHBACK_MS: Final = "grpc-retry-pushback-ms"
#: The same as a parameter of a response in a stream, which has no trailers of its own.
STREAM_RETRY_AFTER_MS: Final = "retry_after_ms"
#: The output of a model with labels that is sent only to clients that ask for it.
PROBABILITIES: Final = "probabilities"
#: The parameter of a model's configuration that names the step before it, such as ``image``.
PREPROCESS: Final = "preprocess"
#: The parameter of a model's configuration that names the space of its embeddings, whichever tier computes them.
SPACE: Final = "space"
#: What the outputs boxes, scores, classes and labels of a detector begin with, whichever the graph's own leave free.
BOX_PREFIXES: Final = ("", "detected_")
#: The parameters of boxes: the score that each exceeds, and the most of a picture.
THRESHOLD: Final = "threshold"
TOP_K: Final = "top_k"
#: The parameter of the last response to a request of a stream.
FINAL_RESPONSE: Final = "triton_final_response"
#: The parameter of a request of a stream that asks for an answer after each step, too.
STREAM_PARTIAL: Final = "stream_partial"
#: Of a looped model: the output, and the fact of each row, with the loops that it took.
LOOPS: Final = "loops"
#: Of generated text: the parameter and the output of the tokens' log-probabilities, and the output of their ids.
LOGPROBS: Final = "logprobs"
TOKEN_IDS: Final = "token_ids"
#: The parameter of a response, and the fact of each row, that says why its loop stopped; empty while it is in progress.
STOPPED: Final = "stopped"
#: Reasons: its residual, its budget of loops, or its deadline; of a text its end or a stop text, or its tokens.
BY_TOLERANCE: Final = "tolerance"
BY_BUDGET: Final = "budget"
BY_DEADLINE: Final = "deadline"
BY_STOP: Final = "stop"
BY_LENGTH: Final = "length"
