"""Latency of a served model without its bundle: the requests are made up from the model's metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edge.client import ONCE, Client
from edge.client.connection import Credentials
from edge.datatypes import NUMPY_TYPES, Array, TensorSpec
from edge.errors import Literally, UsageError
from edge.load.bench import ROUNDS, BenchReport, latency, series
from edge.load.workload import text_inputs

_REQUESTS = 16


def bench_served(
    model: str,
    *,
    url: str,
    requests: int,
    concurrency: int,
    rows: int,
    texts: Sequence[str] = (),
    credentials: Credentials | None = None,
    advanced: Callable[[], None] = lambda: None,
) -> BenchReport:
    """Measure a model as clients of a server see it.

    Args:
        model: its name.
        url: address of the server.
        requests: total number of requests, after a tenth of them to warm up.
        concurrency: number of clients, each of which waits for its answer before the next request.
        rows: batch size of each request.
        texts: lines to send, with a tab between the texts of a pair; empty makes up numbers.
        credentials: TLS and a token for the server.
        advanced: called after each of the rounds.

    Raises:
        UsageError: no inputs can be made up for the model, or the texts or the rows do not fit it.
        ServerError: the server cannot be reached, or refuses.
    """
    with Client(url, retries=ONCE, credentials=credentials) as client:
        specs, _ = client.metadata(model)
        if texts:
            names = [spec.name for spec in specs if spec.datatype == "BYTES"]
            inputs = text_inputs(model, names, rows, texts)
        else:
            inputs = made_up_inputs(model, specs, rows)

        def call(each: dict[str, Array]) -> None:
            client.infer(model, each)

        series(call, inputs, max(requests // 10, concurrency), concurrency)
        measured = []
        for _ in range(ROUNDS):
            measured.append(series(call, inputs, max(requests // ROUNDS, concurrency), concurrency))
            advanced()
    return BenchReport(model, "", rows, concurrency, None, latency(measured), None)


def made_up_inputs(model: str, specs: Sequence[TensorSpec], rows: int) -> list[dict[str, Array]]:
    """Return requests for the numeric inputs of a model: normally distributed floats, zeros for other numbers.

    Text inputs are left out: a model that requires one refuses the request.

    Raises:
        UsageError: the model has no numeric inputs, their shapes vary beyond the batch, or there is no batch to hold
            ``rows``.
    """
    numeric = [spec for spec in specs if spec.datatype != "BYTES"]
    if not numeric or any(-1 in spec.shape[1:] for spec in numeric):
        given = Literally(", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in specs))
        fix = "Give lines of text with --texts, or the bundle's directory in place of its name for its golden inputs."
        raise UsageError(f"inputs of {model}", given=given, expected="numbers of a fixed shape", fix=fix)
    if rows > 1 and any(spec.shape[0] != -1 for spec in numeric):
        raise UsageError("--rows", given=rows, expected=f"1, since {model} has no batch", fix="Leave it out.")
    generator = np.random.default_rng(0)
    return [
        {
            spec.name: _numbers(generator, spec, [rows if size == -1 else size for size in spec.shape])
            for spec in numeric
        }
        for _ in range(_REQUESTS)
    ]


def _numbers(generator: np.random.Generator, spec: TensorSpec, shape: Sequence[int]) -> Array:
    dtype = NUMPY_TYPES[spec.datatype]
    return generator.normal(size=shape).astype(dtype) if dtype.kind == "f" else np.zeros(shape, dtype)
