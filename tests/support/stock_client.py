"""Served bundles, asked by the stock client over gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import tritonclient.grpc as triton

from edge.datatypes import Array
from edge.launch import running_server
from tests.support.sample_requests import triton_input


@contextmanager
def served_bundles(bundles: Sequence[Path], cache: Path) -> Iterator[Callable[..., dict[str, Array]]]:
    """Serve bundles; yield a function from a model, its inputs and parameters to its outputs by name."""
    with (
        running_server(bundles, target="onnxruntime", cache=cache) as ready,
        triton.InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client,
    ):

        def ask(
            model: str, inputs: Mapping[str, Array], outputs: Sequence[str] = (), **parameters: str
        ) -> dict[str, Array]:
            wanted = [triton.InferRequestedOutput(name) for name in outputs]
            sent = [triton_input(*pair) for pair in inputs.items()]
            result = client.infer(model, sent, outputs=wanted, parameters=parameters)
            return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}

        yield ask
