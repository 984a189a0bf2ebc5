"""Call a model with Fewheads' client: one request, then several on one stream. Several servers take turns.

python deploy/examples/ask.py calculator-oracle "3 - -4 + 2" 127.0.0.1:8001 [127.0.0.1:9001 ...]
"""

from __future__ import annotations

import sys

from edge.client import Client, InferFailure, InferRequest, text
from edge.errors import FewheadsError


def main(model: str, question: str, *servers: str) -> None:
    """Print the answers; every failure is a FewheadsError."""
    with Client(servers, timeout_seconds=10) as client:
        # Transient failures are retried, on another server if there is one, for ten seconds in all.
        result = client.infer(model, {"expression": text([question])}, timings=True)
        print(f"{question} = {result.outputs['value'][0, 0]:g}")
        print(f"from {result.call.server} after {result.call.attempts} attempts, {result.round_trip_ns / 1e6:.2f} ms,")
        print(f"of which the model took {result.timings_ns['compute_infer_ns'] / 1e6:.2f} ms")

        # In a stream, an error affects only its own request and is returned as its answer.
        questions = ("1 + 1", "1 +", "2 + 2")
        requests = [InferRequest(model=model, inputs={"expression": text([each])}) for each in questions]
        for each, answer in zip(questions, client.infer_stream(requests), strict=True):
            shown = answer.message if isinstance(answer, InferFailure) else f"{answer.outputs['value'][0, 0]:g}"
            print(f"{each} = {shown}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except FewheadsError as error:
        sys.exit(f"ask.py: {error}")
