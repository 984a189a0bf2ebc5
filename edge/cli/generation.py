"""Generated text: the options of a request for it, and text that is printed as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from edge.cli.options import grouped_options
from edge.cli.output import remark
from edge.datatypes import TensorSpec
from edge.errors import Raw, ServerRefused, UsageError, printable

if TYPE_CHECKING:
    from edge.client import Client, InferRequest

#: Outputs of a model that generates text.
_TEXT, _GENERATED = "text", "generated"
_MOST_INT32, _MOST_INT64 = 2**31 - 1, 2**63 - 1
_OPTIONS = (
    click.option(
        "--max-tokens",
        type=click.IntRange(1, _MOST_INT32),
        help="Most tokens of a generated text.  [default: the model's]",
    ),
    click.option(
        "--min-tokens",
        type=click.IntRange(0, _MOST_INT32),
        help="Tokens before which the text neither ends nor has a --stop.  [default: 0]",
    ),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model's end of a text."),
    click.option(
        "--temperature",
        type=click.FloatRange(0, 100),
        help="Draw tokens at this temperature; 0 takes the likeliest.  [default: 0]",
    ),
    click.option(
        "--top-k",
        type=click.IntRange(0, _MOST_INT32),
        help="Draw from so many of the likeliest tokens; 0 from all.  [default: 0]",
    ),
    click.option(
        "--top-p",
        type=click.FloatRange(0, 1, min_open=True),
        help="Draw from the fewest likeliest tokens with this probability.  [default: 1]",
    ),
    click.option("--seed", type=click.IntRange(0, _MOST_INT64), help="Seed of the draws.  [default: a new one]"),
    click.option("--stop", multiple=True, metavar="TEXT", help="Text that ends the generated one; repeatable."),
    click.option("--head", default="", metavar="NAME[:VERSION]", help="Model that moves the logits.  [default: none]"),
    click.option("--alpha", type=float, help="How much the head moves them.  [default: the head's]"),
)
#: Adds the options of generated text to a command, which gets them as ``sampling``, fields of a request.
sampling_options = grouped_options(dict, "sampling", _OPTIONS)


def streams(model: str, outputs: Sequence[TensorSpec], stream: bool | None, as_json: bool) -> bool:
    """Return whether to print text as it comes: if ``stream`` says so, otherwise on a terminal.

    Raises:
        UsageError: ``stream`` is set, and the model generates no text, or its answer is to be JSON.
    """
    generates = {(_TEXT, "BYTES"), (_GENERATED, "INT32")} <= {(spec.name, spec.datatype) for spec in outputs}
    if stream and as_json:
        raise UsageError("--stream", given=Raw("--json, too"), expected="one of them", fix="Leave one out.")
    if stream and not generates:
        given = Raw(f"the outputs {', '.join(printable(spec.name) for spec in outputs)}")
        expected = f"a model with {_TEXT} and {_GENERATED}"
        raise UsageError(f"--stream for {model}", given=given, expected=expected, fix="Leave it out.")
    return generates and not as_json and sys.stdout.isatty() if stream is None else stream


def print_as_it_comes(client: Client, request: InferRequest, timeout_seconds: float) -> None:
    """Print the text of each row of a request, one after the other, and a line about each on stderr.

    Raises:
        ServerError: the server refuses a row, fails, or takes longer than ``timeout_seconds`` for it.
    """
    for row in range(len(next(iter(request.inputs.values())))):
        inputs = {name: array[row : row + 1] for name, array in request.inputs.items()}
        _print_row(client, replace(request, inputs=inputs, partial_answers=True), timeout_seconds)


def _print_row(client: Client, request: InferRequest, timeout_seconds: float) -> None:
    from edge.client import InferFailure

    begun, first_ms = time.perf_counter(), 0.0
    tokens, stopped, server = 0, "", ""
    try:
        for answer in client.infer_stream([request], timeout_seconds=timeout_seconds):
            if isinstance(answer, InferFailure):
                error = answer.error()
                raise ServerRefused(error.subject, given=error.given, expected=error.expected, fix=error.fix)
            piece = b"".join(answer.outputs[_TEXT].ravel().tolist()).decode(errors="backslashreplace")
            first_ms = first_ms or 1e3 * (time.perf_counter() - begun)
            click.echo("\n".join(printable(line) for line in piece.split("\n")), nl=False)
            tokens, stopped, server = answer.outputs[_GENERATED].item(), answer.stopped, answer.call.server
    finally:
        if first_ms:
            click.echo()
    taken = f"the first answer after {first_ms:.0f} ms, the last after {1e3 * (time.perf_counter() - begun):.0f} ms"
    remark(f"{tokens} tokens, stopped by its {stopped}; {taken}, from {server}")
