"""``fewheads infer``: send one request to a served model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from edge.cli.answers import are_images, labels_of, print_answer, read_images, takes_images, top_options
from edge.cli.infer import print_as_it_comes, read_tensors, sampling_options, streams
from edge.cli.options import connection_options
from edge.cli.output import json_option, print_json, print_table
from edge.datatypes import Array, TensorSpec
from edge.errors import Raw, UsageError, printable
from edge.protocol import PROBABILITIES

if TYPE_CHECKING:
    from edge.client import InferResult
    from edge.client.connection import Credentials

_STAGES = ("compute_input_ns", "queue_ns", "compute_infer_ns", "compute_output_ns")
#: Start of a text that is not an option.
_MINUS = re.compile(r"-[\d\s(.]")
#: Prefix of such text while click parses; arguments of a process cannot contain it.
_MARK = "\0"
_EPILOG = """\b
Examples:
  fewheads infer calculator-gate "3 - -4 + 2"
  fewheads infer sts-b "A man plays." --text-pair "Somebody plays."
  fewheads infer digits picture.png --top 3
  fewheads infer feedback "a delightful film" --policy deadline --deadline-ms 5
  fewheads infer looped-linear --input @prompt.json --max-loops 12
  fewheads infer writer "1, 2, 3," --max-tokens 40 --temperature 0.8 --stop . --stream
  fewheads infer writer "1, 2, 3," --head writer-head --alpha 0.5

TEXT may begin with a minus and a number, a space or a parenthesis. Text that looks like an option goes after --.
For a model that takes images, TEXT is the path of a JPEG or PNG file, or - for stdin.

\b
A model with several tiers also returns tier_reason, the reason for its choice of a tier:
  requested  --tier names it
  pinned     the policy always takes the full tier
  router     the policy takes the lean tier, and the full one if the lean one was not sure
  deadline   the policy chose a leaner tier, because the full one would have been too late
  load       the policy chose a leaner tier, because requests were waiting
  full       the policy had a choice, and took the full tier

\b
A looped model also returns stopped, the reason for its end:
  tolerance  the residual of every row is at most the tolerance
  budget     a row used up its loops
  deadline   the policy deadline ended it in time, with the prediction so far

\b
So does a model that generates text:
  stop       its end, or a text of --stop
  length     --max-tokens, or the most tokens of the model
  deadline   as above

Exit codes: 7 if the server refuses the request, 6 if no server answers in time.
"""


class _TextCommand(click.Command):
    """Command that takes arguments such as "-3 + 4" as text, and rejects unknown options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, with such text marked, so that click does not take it for options."""
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
@click.option("--text-pair", "pairs", multiple=True, metavar="TEXT", help="Second text of a pair; one for each TEXT.")
@click.option(
    "--input",
    "tensors",
    multiple=True,
    metavar="NAME=JSON",
    help="A tensor; NAME=@FILE.npy reads a file, and @FILE an .npz, or JSON by name.",
)
@click.option("--version", "model_version", default="", help="Version of the model.  [default: the highest]")
@click.option("--tier", default="", help="Tier to compute on.  [default: the server's choice]")
@click.option("--policy", default="", help="Choice of the tier: pinned, router, deadline or load.")
@click.option(
    "--max-loops", type=click.IntRange(1), help="Most loops of a row of a looped model.  [default: the model's]"
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, min_open=True),
    help="Residual at which a row of a looped model ends.  [default: the model's]",
)
@click.option("--top", type=click.IntRange(1), help="Show this many of the likeliest labels, with their probabilities.")
@sampling_options
@click.option(
    "--stream/--no-stream", default=None, help="Print a generated text as it comes.  [default: on a terminal]"
)
@click.option(
    "--deadline-ms", type=click.FloatRange(0, min_open=True), help="Limit for the request.  [default: --timeout]"
)
@click.option(
    "--url",
    "urls",
    multiple=True,
    default=("127.0.0.1:8001",),
    show_default="127.0.0.1:8001",
    help="The server's gRPC address; several take turns, and take over from one that fails.",
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
    max_loops: int | None,
    tolerance: float | None,
    top: int | None,
    sampling: dict[str, Any],
    stream: bool | None,
    deadline_ms: float | None,
    urls: tuple[str, ...],
    timeout: float,
    credentials: Credentials | None,
    as_json: bool,
) -> None:
    """Send TEXT, pairs of texts, images, or tensors to MODEL, and show the outputs and the time of each stage."""
    from edge.client import Client, InferRequest

    with Client(urls, timeout, credentials=credentials) as client:
        specs, outputs = client.metadata(model, model_version)
        images = are_images(client, model, model_version, texts)
        if not (texts or pairs or tensors):  # an error, whose example fits the model
            images = takes_images(client, model, model_version)
        inputs = _inputs(model, {spec.name: spec for spec in specs}, [texts, pairs], tensors, images=images)
        options: dict[str, Any] = {"tier": tier, "policy": policy, "max_loops": max_loops, "tolerance": tolerance}
        options |= sampling | top_options(model, [spec.name for spec in outputs], top)
        limit = deadline_ms / 1e3 if deadline_ms else None
        if streams(model, outputs, stream, as_json):
            request = InferRequest(model, inputs, version=model_version, timeout_seconds=limit, **options)
            print_as_it_comes(client, request, timeout)
            return
        result = client.infer(model, inputs, version=model_version, timings=True, timeout_seconds=limit, **options)
    _show(model, {"image" if images else "text": texts, "text_pair": pairs}, result, top, as_json)


def _inputs(
    model: str,
    specs: dict[str, TensorSpec],
    columns: Sequence[tuple[str, ...]],
    tensors: tuple[str, ...],
    *,
    images: bool,
) -> dict[str, Array]:
    from edge.client import text

    inputs = read_tensors(tensors, specs)
    if any(columns):
        names = [name for name, spec in specs.items() if spec.datatype == "BYTES"]
        _check(model, names, columns, specs)
        for name, column in zip(names, columns, strict=False):
            inputs[name] = read_images(column) if images else text(column)
    if not inputs:
        raise UsageError(
            "input", given=Raw("none"), expected="TEXT or --input", fix=_example(model, specs, images=images)
        )
    return inputs


def _example(model: str, specs: dict[str, TensorSpec], *, images: bool = False) -> str:
    texts = [name for name, spec in specs.items() if spec.datatype == "BYTES"]
    if images:
        arguments = "picture.png"
    elif texts == ["expression"]:
        arguments = '"3 - -4 + 2"'
    elif len(texts) in (1, 2):
        arguments = ('"some text"', '"first text" --text-pair "second text"')[len(texts) - 1]
    else:
        files = " ".join(f"--input {printable(name)}=@{printable(name)}.npy" for name in specs)
        shapes = ", ".join(f"{spec.datatype} {list(spec.shape)}" for spec in specs.values())
        arguments = f"{files} (NumPy: {printable(shapes)})"
    return f"Try: fewheads infer {model} {arguments}"


def _check(model: str, names: list[str], columns: Sequence[tuple[str, ...]], specs: dict[str, TensorSpec]) -> None:
    """Check that there is a column of texts for each text input of a model, all of the same length."""
    subject, counts = f"TEXT for {model}", [len(column) for column in columns[: len(names)]]
    if not 1 <= len(names) <= 2:
        given = Raw(f"{len(names)} text inputs")
        raise UsageError(subject, given=given, expected="one or two", fix=_example(model, specs))
    if len(names) == 1 and columns[1]:
        fix = "Leave --text-pair out; this model reads one text at a time."
        raise UsageError(f"--text-pair for {model}", given=columns[1][0], expected="TEXT alone", fix=fix)
    if len(set(counts)) > 1:
        given = Raw("{} TEXT, {} --text-pair".format(*counts))
        fix = "This model reads two texts together: give --text-pair once for each TEXT."
        raise UsageError(subject, given=given, expected="as many of both", fix=fix)


def _show(model: str, columns: dict[str, tuple[str, ...]], result: InferResult, top: int | None, as_json: bool) -> None:
    outputs = {name: np.atleast_1d(_plain(array)).tolist() for name, array in result.outputs.items()}
    labels = labels_of(result.outputs[PROBABILITIES]) if top else None
    if labels:
        outputs = {PROBABILITIES: labels}
    # Other servers send no stage times, so all of the time counts as transport.
    stages_ns = {stage: result.timings_ns[stage] for stage in _STAGES if stage in result.timings_ns}
    times_ms = {stage.removesuffix("_ns"): duration / 1e6 for stage, duration in stages_ns.items()}
    times_ms["transport"] = (result.round_trip_ns - sum(stages_ns.values())) / 1e6
    times_ms["round_trip"] = result.round_trip_ns / 1e6
    if as_json:
        facts = {"model": model, "version": result.model_version, "tier": result.tier}
        facts |= {"tier_reason": result.tier_reason, "stopped": result.stopped, "server": result.call.server}
        print_json({**facts, "outputs": outputs, "times_ms": times_ms})
        return
    how = f", tier {result.tier} ({result.tier_reason})" if result.tier else ""
    how += f", stopped by its {result.stopped}" if result.stopped else ""
    title = f"{model} version {result.model_version}{how}, from {result.call.server}"
    print_answer(title, columns, result.outputs, outputs, labels)
    print_table("time", ["stage", "ms"], [[stage, milliseconds] for stage, milliseconds in times_ms.items()])


def _plain(array: Array) -> Array:
    """Return BYTES as text, with invalid UTF-8 escaped, and numbers unchanged."""
    if array.dtype.kind != "O":
        return array
    return np.asarray(np.frompyfunc(lambda item: item.decode(errors="backslashreplace"), 1, 1)(array))
