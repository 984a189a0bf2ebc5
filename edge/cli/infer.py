"""``fewheads infer``: send one request to a served model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile

import click
import numpy as np

from edge.cli.options import connection_options
from edge.cli.output import json_option, print_json, print_table
from edge.datatypes import NUMPY_TYPES, Array, TensorSpec
from edge.errors import Literally, UsageError, printable

if TYPE_CHECKING:
    from edge.client import InferResult
    from edge.client.connection import Credentials

_STAGES = ("compute_input_ns", "queue_ns", "compute_infer_ns", "compute_output_ns")
#: Text that begins with a minus, as against an option.
_MINUS = re.compile(r"-[\d\s(.]")
#: Put before such text while click parses; no argument of a process can hold it.
_MARK = "\0"
_EPILOG = """\b
Examples:
  fewheads infer calculator-gate "3 - -4 + 2"
  fewheads infer sts-b "A man plays." --text-pair "Somebody plays."
  fewheads infer digits --input image=@image.npy
  fewheads infer feedback "a delightful film" --policy deadline --deadline-ms 5

TEXT may begin with a minus and a number, a space or a parenthesis. Text that looks like an option goes after --.

\b
A model with several tiers also returns tier_reason, why this tier computed the answer:
  requested  --tier names it
  pinned     the policy always takes the full tier
  router     the policy takes the lean tier, and the full one where the lean one was not sure
  deadline   the policy chose a leaner tier, because the full one would have been too late
  load       the policy chose a leaner tier, because requests were waiting
  full       the policy could choose, and took the full tier

Exit codes: 7 if the server refuses the request, 6 if no server answers in time.
"""


class _TextCommand(click.Command):
    """A command whose arguments may be text that begins with a minus, and whose unknown options are errors."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, with text that begins with a minus hidden from click's search for options."""
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option) and not each.is_flag]
        with_value = {name for option in options for name in option.opts}
        marked: list[str] = []
        is_value = False
        for position, argument in enumerate(args):
            if argument == "--" and not is_value:
                marked += args[position:]
                break
            is_text = not is_value and _MINUS.match(argument)
            marked.append(f"{_MARK}{argument}" if is_text else argument)
            is_value = not is_value and argument in with_value
        rest = super().parse_args(ctx, marked)
        for name, value in ctx.params.items():
            if isinstance(value, str):
                ctx.params[name] = value.removeprefix(_MARK)
            elif name == "texts":
                ctx.params[name] = tuple(text.removeprefix(_MARK) for text in value)
        return rest


@click.command(cls=_TextCommand, epilog=_EPILOG)
@click.argument("model")
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option(
    "--text-pair", "pairs", multiple=True, metavar="TEXT", help="Second text, for models of two; one for each TEXT."
)
@click.option("--input", "tensors", multiple=True, metavar="NAME=JSON", help="A tensor; NAME=@FILE.npy reads a file.")
@click.option("--version", "model_version", default="", help="Version of the model.  [default: the highest]")
@click.option("--tier", default="", help="Tier to compute on.  [default: the server's choice]")
@click.option(
    "--policy",
    default="",
    help="How the server chooses the tier: pinned, router, deadline or load.  [default: the server's]",
)
@click.option(
    "--deadline-ms",
    type=click.FloatRange(min=0, min_open=True),
    help="Deadline of the request, which --policy deadline takes into account.  [default: --timeout]",
)
@click.option(
    "--url",
    "urls",
    multiple=True,
    default=("127.0.0.1:8001",),
    show_default="127.0.0.1:8001",
    help="The server's gRPC address; several take turns, and stand in for each other.",
)
@click.option("--timeout", type=float, default=10.0, show_default=True, help="Seconds to wait for each call.")
@connection_options
@json_option
def infer(
    model: str,
    texts: tuple[str, ...],
    pairs: tuple[str, ...],
    tensors: tuple[str, ...],
    model_version: str,
    tier: str,
    policy: str,
    deadline_ms: float | None,
    urls: tuple[str, ...],
    timeout: float,
    credentials: Credentials | None,
    as_json: bool,
) -> None:
    """Send TEXT, pairs of texts, or tensors to MODEL, and show the answer and where the time went."""
    from edge.client import Client

    with Client(urls, timeout, credentials=credentials) as client:
        specs, _ = client.metadata(model, model_version)
        inputs = _inputs(model, {spec.name: spec for spec in specs}, [texts, pairs], tensors)
        # The first request warms up a server; the second, at the same server, is measured and has the deadline.
        first = client.infer(model, inputs, version=model_version, tier=tier, policy=policy)
        result = client.infer(
            model,
            inputs,
            version=model_version,
            tier=tier,
            policy=policy,
            timings=True,
            timeout_seconds=deadline_ms / 1e3 if deadline_ms else None,
            server=first.call.server,
        )
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
        columns = _checked(model, names, columns, specs)
        inputs |= {name: text(column) for name, column in zip(names, columns, strict=True)}
    if not inputs:
        raise UsageError("input", given=Literally("none"), expected="TEXT or --input", fix=_example(model, specs))
    return inputs


def _example(model: str, specs: dict[str, TensorSpec]) -> str:
    """Return a command that suits the inputs of a model."""
    texts = [name for name, spec in specs.items() if spec.datatype == "BYTES"]
    if texts == ["expression"]:
        arguments = '"3 - -4 + 2"'
    elif len(texts) == 1:
        arguments = '"some text"'
    elif len(texts) == 2:
        arguments = '"first text" --text-pair "second text"'
    else:
        arguments = " ".join(f"--input {printable(name)}=@{printable(name)}.npy" for name in specs)
        shapes = ", ".join(f"{spec.datatype} {list(spec.shape)}" for spec in specs.values())
        return f"Try: fewheads infer {model} {arguments} (NumPy: {printable(shapes)})"
    return f"Try: fewheads infer {model} {arguments}"


def _checked(
    model: str, names: Sequence[str], columns: Sequence[tuple[str, ...]], specs: dict[str, TensorSpec]
) -> Sequence[tuple[str, ...]]:
    """Return a column of texts for each text input of the model, all of one length."""
    options = ("TEXT", "--text-pair")
    subject, found = f"TEXT for {model}", Literally(f"{len(names)} text inputs")
    if not 1 <= len(names) <= len(options):
        raise UsageError(subject, given=found, expected="one or two", fix=_example(model, specs))
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
    # Other servers send no stage times; then all of the time counts as transport.
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
    """Return BYTES as text, with what is not UTF-8 escaped, and numbers unchanged."""
    if array.dtype.kind != "O":
        return array
    return np.asarray(np.frompyfunc(lambda item: item.decode(errors="backslashreplace"), 1, 1)(array))


def _cell(values: Sequence[object], row: int) -> object:
    """Return one row of an output; without a batch, outputs may have fewer rows than others."""
    value = values[row] if row < len(values) else ""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
