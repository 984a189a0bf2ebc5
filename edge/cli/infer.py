"""``fewheads infer``: ask a served model once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile

import click
import numpy as np

from edge.cli.connection import connection_options
from edge.cli.output import json_option, print_json, print_table
from edge.datatypes import NUMPY_TYPES, Array, TensorSpec
from edge.errors import Literally, UsageError

if TYPE_CHECKING:
    from edge.client import InferResult
    from edge.client.connection import Credentials

_STAGES = ("compute_input_ns", "queue_ns", "compute_infer_ns", "compute_output_ns")


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("model")
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option(
    "--text-pair", "pairs", multiple=True, metavar="TEXT", help="The second text, for models of two; one for each TEXT."
)
@click.option("--input", "tensors", multiple=True, metavar="NAME=JSON", help="A tensor; NAME=@file.npy reads a file.")
@click.option("--version", "model_version", default="", help="Version of the model.  [default: the highest]")
@click.option("--tier", default="", help="Which tier shall answer.  [default: the server's choice]")
@click.option(
    "--url",
    "urls",
    multiple=True,
    default=("127.0.0.1:8001",),
    show_default="127.0.0.1:8001",
    help="The server's gRPC address; several take turns, and stand in for each other.",
)
@click.option("--timeout", type=float, default=10.0, show_default=True, help="Seconds to wait.")
@connection_options
@json_option
def infer(
    model: str,
    texts: tuple[str, ...],
    pairs: tuple[str, ...],
    tensors: tuple[str, ...],
    model_version: str,
    tier: str,
    urls: tuple[str, ...],
    timeout: float,
    credentials: Credentials | None,
    as_json: bool,
) -> None:
    r"""Ask MODEL for TEXT, for pairs of texts, or for tensors, and show the answer and where the time went.

    \b
    fewheads infer calculator-gate "3 - -4 + 2"
    fewheads infer sts-b "A man plays." --text-pair "Somebody plays."
    fewheads infer calculator-gate --input x='[[3,0,-4,1,2,.5,.5,.5,.5,.5,.5,.5,.5,.5,.5]]'
    """
    from edge.client import Client

    with Client(urls, timeout, credentials=credentials) as client:
        specs, _ = client.metadata(model, model_version)
        inputs = _inputs(model, {spec.name: spec for spec in specs}, [texts, pairs], tensors)
        # The first call opens the connection; time the second, at the same server.
        first = client.infer(model, inputs, version=model_version, tier=tier)
        server = first.call.server
        result = client.infer(model, inputs, version=model_version, tier=tier, timings=True, server=server)
    _show(model, [texts, pairs], result, as_json)


def _inputs(
    model: str, specs: dict[str, TensorSpec], columns: Sequence[tuple[str, ...]], tensors: tuple[str, ...]
) -> dict[str, Array]:
    from edge.client import text

    inputs = {}
    for tensor in tensors:
        name, found, value = tensor.partition("=")
        if not found or name not in specs:
            raise UsageError(
                "--input", given=tensor, expected=f"NAME=JSON with NAME of {sorted(specs)}", fix="Name it."
            )
        inputs[name] = _tensor(name, value, specs[name])
    if any(columns):
        names = [name for name, spec in specs.items() if spec.datatype == "BYTES"]
        inputs |= {name: text(column) for name, column in zip(names, _checked(model, names, columns), strict=True)}
    if not inputs:
        fix = f'Try: fewheads infer {model} "3 - -4 + 2"'
        raise UsageError("input", given=Literally("none"), expected="TEXT or --input", fix=fix)
    return inputs


def _checked(model: str, names: Sequence[str], columns: Sequence[tuple[str, ...]]) -> Sequence[tuple[str, ...]]:
    """Return a column of texts for each text input of the model, all of one length."""
    options = ("TEXT", "--text-pair")
    subject, found = f"TEXT for {model}", Literally(f"{len(names)} text inputs")
    if not 1 <= len(names) <= len(options):
        raise UsageError(subject, given=found, expected="one or two", fix="Send tensors with --input.")
    wanted, further = columns[: len(names)], columns[len(names) :]
    if any(further):
        fix = "Leave --text-pair out; this model reads one text at a time."
        raise UsageError(f"--text-pair for {model}", given=further[0][0], expected="TEXT alone", fix=fix)
    counts = [len(column) for column in wanted]
    if len(set(counts)) > 1:
        given = Literally(", ".join(f"{count} {option}" for count, option in zip(counts, options, strict=True)))
        fix = "This model reads two texts together: give --text-pair once for each TEXT."
        raise UsageError(subject, given=given, expected="as many of both", fix=fix)
    return wanted


def _tensor(name: str, value: str, spec: TensorSpec) -> Array:
    subject, fix = f"--input {name}", "Quote it for the shell, for example --input x='[[1, 2]]'."
    expected = f"{spec.datatype} of shape {list(spec.shape)}, as JSON or @file.npy"
    try:
        loaded = np.load(Path(value[1:]), allow_pickle=False) if value.startswith("@") else json.loads(value)
        array = np.asarray(loaded, dtype=NUMPY_TYPES[spec.datatype])
        return np.asarray(np.frompyfunc(_encoded, 1, 1)(array)) if spec.datatype == "BYTES" else array
    except (OSError, EOFError, BadZipFile, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise UsageError(subject, given=Literally(f"{value} ({error})"), expected=expected, fix=fix) from None


def _encoded(item: object) -> bytes:
    if not isinstance(item, str | bytes):
        raise TypeError(f"{item!r} is no text")
    return item.encode() if isinstance(item, str) else item


def _show(model: str, columns: Sequence[tuple[str, ...]], result: InferResult, as_json: bool) -> None:
    outputs = {name: np.atleast_1d(_plain(array)).tolist() for name, array in result.outputs.items()}
    # Servers of other makers send no stage times; then all of it is transport.
    stages_ns = {stage: result.timings_ns[stage] for stage in _STAGES if stage in result.timings_ns}
    times_ms = {stage.removesuffix("_ns"): duration / 1e6 for stage, duration in stages_ns.items()}
    times_ms["transport"] = (result.round_trip_ns - sum(stages_ns.values())) / 1e6
    times_ms["round_trip"] = result.round_trip_ns / 1e6
    if as_json:
        print_json(
            {
                "model": model,
                "version": result.model_version,
                "tier": result.tier,
                "tier_reason": result.tier_reason,
                "server": result.call.server,
                "outputs": outputs,
                "times_ms": times_ms,
            }
        )
        return
    rows = max(len(values) for values in outputs.values())
    texts = {name: column for name, column in zip(("text", "text_pair"), columns, strict=True) if column}
    tier = f", tier {result.tier} ({result.tier_reason})" if result.tier else ""
    print_table(
        f"{model} version {result.model_version}{tier}, from {result.call.server}",
        [*texts, *outputs],
        [[_cell(values, row) for values in (*texts.values(), *outputs.values())] for row in range(rows)],
    )
    print_table("time", ["stage", "ms"], [[stage, milliseconds] for stage, milliseconds in times_ms.items()])


def _plain(array: Array) -> Array:
    """Return BYTES as text, with what is no UTF-8 escaped, and numbers as they are."""
    if array.dtype.kind != "O":
        return array
    return np.asarray(np.frompyfunc(lambda item: item.decode(errors="backslashreplace"), 1, 1)(array))


def _cell(values: Sequence[object], row: int) -> object:
    """Return one row of an output; without a batch, outputs may have fewer rows than others."""
    value = values[row] if row < len(values) else ""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
