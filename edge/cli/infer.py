"""``fewheads infer``: sends one request to a served model."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import click
import numpy as np

from edge.cli.answers import ANSWER, box_prefix, labels_of, print_answer, print_stream
from edge.cli.options import FloatRange, added, connection_options
from edge.cli.output import json_option
from edge.datatypes import NUMPY_TYPES, Array, TensorSpec
from edge.errors import Raw, ServerRefused, UsageError, elided, printable
from edge.protocol import PROBABILITIES

if TYPE_CHECKING:
    from edge.client import Client
    from edge.client.connection import Credentials

#: Start of a text that is not an option.
_MINUS = re.compile(r"-[\d\s(.]")
#: Prefix of such text while click parses; arguments of a process cannot contain it.
_MARK = "\0"
_STDIN, _IMAGE = "-", "image"
#: A path with one of these is meant as a file, even if there is none.
_ENDINGS = (".jpg", ".jpeg", ".png")
#: What reading and converting malformed input raises.
_MALFORMED = (OSError, EOFError, BadZipFile, ValueError, TypeError, OverflowError, RecursionError)
#: NumPy's kinds of the elements of JSON, and the kinds that each kind of tensor takes.
_KINDS, _TAKEN = {bool: "b", int: "i", float: "f"}, {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}
_MOST_QUOTED_CHARS = 80
_MOST_INT32, _MOST_INT64 = 2**31 - 1, 2**63 - 1
_EPILOG = """\b
Examples:
  fewheads infer calculator-gate "3 - -4 + 2"
  fewheads infer sts-b "A man plays." --text-pair "Somebody plays."
  fewheads infer digits picture.png --top 3
  fewheads infer squad "Who sat?" --text-pair "The cat sat on the mat." --top 3
  fewheads infer detector street.jpg --threshold 0.3
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
_SAMPLING = (
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
        type=FloatRange(0, 100),
        help="Draw tokens at this temperature; 0 takes the likeliest.  [default: 0]",
    ),
    click.option(
        "--top-k",
        type=click.IntRange(0, _MOST_INT32),
        help="Draw from so many of the likeliest tokens; 0 from all.  [default: 0]",
    ),
    click.option(
        "--top-p",
        type=FloatRange(0, 1, min_open=True),
        help="Draw from the fewest likeliest tokens with this probability.  [default: 1]",
    ),
    click.option("--seed", type=click.IntRange(0, _MOST_INT64), help="Seed of the draws.  [default: a new one]"),
    click.option("--stop", multiple=True, metavar="TEXT", help="Text that ends the generated one; repeatable."),
    click.option("--head", default="", metavar="NAME[:VERSION]", help="Model that moves the logits.  [default: none]"),
    click.option("--alpha", type=float, help="How much the head moves them.  [default: the head's]"),
)


class _TextCommand(click.Command):
    """Command that takes arguments such as "-3 + 4" as text, and rejects unknown options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, with such text marked, so that click does not take it for options."""
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option) and not each.is_flag]
        with_value = {name for option in options for name in option.opts}
        end = args.index("--") if "--" in args else len(args)
        marked = [
            f"{_MARK}{text}" if _MINUS.match(text) and before not in with_value else text
            for before, text in zip(["", *args], args[:end], strict=False)
        ]
        rest = super().parse_args(ctx, [*marked, *args[end:]])
        if not ctx.resilient_parsing:  # as for completion, where arguments may be missing
            ctx.params["model"] = ctx.params["model"].removeprefix(_MARK)
            ctx.params["texts"] = tuple(text.removeprefix(_MARK) for text in ctx.params["texts"])
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
@click.option("--version", default="", help="Version of the model.  [default: the highest]")
@click.option("--tier", default="", help="Tier to compute on.  [default: the server's choice]")
@click.option("--policy", default="", help="Choice of the tier: pinned, router, deadline or load.")
@click.option(
    "--max-loops", type=click.IntRange(1), help="Most loops of a row of a looped model.  [default: the model's]"
)
@click.option(
    "--tolerance",
    type=FloatRange(0, min_open=True),
    help="Residual at which a row of a looped model ends.  [default: the model's]",
)
@click.option(
    "--top", type=click.IntRange(1), help="Show so many of the likeliest labels or answers, or boxes of a picture."
)
@click.option("--threshold", type=FloatRange(0, 1), help="Score that boxes exceed.  [default: the model's]")
@partial(added, _SAMPLING)
@click.option(
    "--stream/--no-stream", default=None, help="Print a generated text as it comes.  [default: on a terminal]"
)
@click.option("--deadline-ms", type=FloatRange(0, min_open=True), help="Limit for the request.  [default: --timeout]")
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
    version: str,
    top: int | None,
    stream: bool | None,
    deadline_ms: float | None,
    urls: tuple[str, ...],
    timeout: float,
    credentials: Credentials | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Send a request to MODEL, and show its outputs and times.

    A request has TEXT, pairs of texts, images, or tensors. The times are those of each stage.
    """
    from edge.client import Client, InferRequest

    if stream and as_json:
        raise UsageError("--stream", expected="either --stream or --json", fix="Leave one out.")
    with Client(urls, timeout, credentials=credentials) as client:
        specs, outputs = ({spec.name: spec for spec in of} for of in client.metadata(model, version))
        images = _takes_images(client, model, version, texts, certain=not (texts or pairs or tensors))
        inputs = dict(_tensors(tensors, specs))
        if texts or pairs:
            inputs |= _texts(model, specs, texts, pairs, images=images)
        if not inputs:
            fix = _example(model, specs, images=images)
            raise UsageError("input", given=Raw("none"), expected="TEXT or --input", fix=fix)
        answers, detects = outputs.keys() >= set(ANSWER), box_prefix(outputs) is not None
        if top and PROBABILITIES not in outputs and not answers and not detects:
            given = Raw(f"{model} with the outputs {', '.join(outputs)}")
            expected = "a model with one label for each input, or with answers or boxes"
            fix = "Leave it out; where each word has a label, that is shown with its probability."
            raise UsageError("--top", given=given, expected=expected, fix=fix)
        generates = [(name, outputs[name].datatype) for name in ("text", "generated") if name in outputs]
        generative = generates == [("text", "BYTES"), ("generated", "INT32")]
        if stream and not generative:
            given, expected = Raw(f"the outputs {', '.join(outputs)}"), "a model with text and generated"
            raise UsageError(f"--stream for {model}", given=given, expected=expected, fix="Leave it out.")
        if top:
            options |= (
                {"n_best": top} if answers else {"top_k": top} if detects else {"outputs": (PROBABILITIES,), "top": top}
            )
        limit = deadline_ms / 1e3 if deadline_ms else None
        request = InferRequest(model, inputs, version=version, timings=True, timeout_seconds=limit, **options)
        if stream or (stream is None and generative and not as_json and sys.stdout.isatty()):
            print_stream(client, request, timeout)
            return
        result = client.infer(**vars(request))
    ranked = options.get("outputs") == (PROBABILITIES,)
    labels = labels_of(result.outputs[PROBABILITIES]) if ranked else None
    columns = {"image" if images else "text": texts, "text_pair": pairs}
    print_answer(result, columns, labels, as_json=as_json)


def _takes_images(client: Client, model: str, version: str, arguments: Sequence[str], *, certain: bool) -> bool:
    """Return whether a model takes images, as its server says, which is asked if an argument may be a file.

    It is also asked if ``certain``, for an error whose example fits the model.
    """
    if not certain and not any(
        path == _STDIN or path.lower().endswith(_ENDINGS) or os.path.isfile(path) for path in arguments
    ):
        return False
    try:
        return client.preprocess(model, version) == _IMAGE
    except ServerRefused as error:
        if error.code == "UNIMPLEMENTED":  # another server
            return False
        raise


def _texts(
    model: str, specs: Mapping[str, TensorSpec], texts: tuple[str, ...], pairs: tuple[str, ...], *, images: bool
) -> dict[str, Array]:
    """Return the texts for each text input of a model, or the contents of images."""
    from edge.client import text

    subject, names = f"TEXT for {model}", [name for name, spec in specs.items() if spec.datatype == "BYTES"]
    if not 1 <= len(names) <= 2:
        given = Raw(f"{len(names)} text inputs")
        raise UsageError(subject, given=given, expected="one or two", fix=_example(model, specs))
    if len(names) == 1 and pairs:
        fix = "Leave --text-pair out; this model reads one text at a time."
        raise UsageError(f"--text-pair for {model}", given=pairs[0], expected="TEXT alone", fix=fix)
    if len(names) == 2 and len(texts) != len(pairs):
        given = Raw(f"{len(texts)} TEXT, {len(pairs)} --text-pair")
        fix = "This model reads two texts together: give --text-pair once for each TEXT."
        raise UsageError(subject, given=given, expected="as many of both", fix=fix)
    return dict(zip(names, [_files(texts) if images else text(texts), text(pairs)], strict=False))


def _files(paths: Sequence[str]) -> Array:
    """Return the contents of files, BYTES [files, 1]; ``-`` is stdin."""
    images = np.empty((len(paths), 1), np.object_)
    try:
        images[:, 0] = [sys.stdin.buffer.read() if path == _STDIN else Path(path).read_bytes() for path in paths]
    except OSError as error:
        fix = "Give paths of JPEG or PNG files, or - for stdin."
        raise UsageError("image", given=Raw(error), expected="a file", fix=fix) from None
    return images


def _example(model: str, specs: Mapping[str, TensorSpec], *, images: bool = False) -> str:
    texts = sum(spec.datatype == "BYTES" for spec in specs.values())
    if texts in (1, 2):
        arguments = "picture.png" if images else '"some text"' + ' --text-pair "another text"' * (texts - 1)
    else:
        shapes = ", ".join(f"{spec.datatype} {list(spec.shape)}" for spec in specs.values())
        arguments = " ".join(f"--input {name}=@{name}.npy" for name in specs) + f" (NumPy: {shapes})"
    return f"Try: fewheads infer {model} {printable(arguments)}"


def _tensors(arguments: Sequence[str], specs: Mapping[str, TensorSpec]) -> Iterator[tuple[str, Array]]:
    """Yield the tensors of ``--input`` by name: NAME=JSON; NAME=@FILE.npy; or @FILE, .npz or JSON objects by name."""
    for argument in arguments:
        name, _, text = argument.partition("=")
        try:
            if argument.startswith("@"):
                values = dict(_read(Path(argument[1:])))
            else:
                values = {name: _read(Path(text[1:])) if text.startswith("@") else json.loads(text)}
        except _MALFORMED as error:
            given = Raw(f"{elided(argument, _MOST_QUOTED_CHARS)} ({error})")
            expected, fix = "NAME=JSON, NAME=@FILE or @FILE", "Quote JSON for the shell, as in --input x='[[1, 2]]'."
            raise UsageError("--input", given=given, expected=expected, fix=fix) from None
        for name, value in values.items():
            if name not in specs:
                raise UsageError("--input", given=name, expected=f"tensors of {sorted(specs)}", fix="Rename it.")
            yield name, _tensor(value, specs[name])


def _read(path: Path) -> Any:
    return np.load(path, allow_pickle=False) if path.suffix in (".npy", ".npz") else json.loads(path.read_bytes())


def _tensor(value: Any, spec: TensorSpec) -> Array:
    try:
        array = _bytes(value) if spec.datatype == "BYTES" else _numbers(value, NUMPY_TYPES[spec.datatype])
    except _MALFORMED as error:
        given = Raw(f"{elided(json.dumps(value, default=str), _MOST_QUOTED_CHARS)} ({error})")
        expected, fix = f"{spec.datatype} of shape {list(spec.shape)}", f"Send what {spec.datatype} can hold."
        raise UsageError(f"--input {spec.name}", given=given, expected=expected, fix=fix) from None
    if not spec.accepts(array.shape):
        fix = "The model's metadata has these sizes, -1 being any."
        if spec.accepts((1, *array.shape)):
            fix = "The first dimension is that of the rows: put a single one into one more pair of brackets."
        given = Raw(f"the shape {list(array.shape)}")
        raise UsageError(f"--input {spec.name}", given=given, expected=f"{list(spec.shape)}", fix=fix)
    return array


def _bytes(value: Any) -> Array:
    array = np.asarray(value, np.object_)
    if not all(isinstance(item, str | bytes) for item in array.flat):
        raise TypeError("an element is not text")
    return np.asarray(np.frompyfunc(lambda item: item.encode() if isinstance(item, str) else item, 1, 1)(array))


def _numbers(value: Any, dtype: np.dtype[Any]) -> Array:
    """Return JSON or an array as numbers of a type, which must hold each of them; floats are rounded."""
    # As objects, because NumPy would make numbers of the truth values beside them.
    given = value if isinstance(value, np.ndarray) else np.asarray(value, np.object_)
    kinds = {_KINDS.get(type(item), "") for item in given.flat} if given.dtype.kind == "O" else {given.dtype.kind}
    if not kinds <= set(_TAKEN[dtype.kind]):
        raise TypeError(f"an element is no {dtype.name}")
    with np.errstate(all="ignore"):
        array = given.astype(dtype)
        held = np.isfinite(array) | ~np.isfinite(given.astype(np.float64)) if dtype.kind == "f" else array == given
    if not np.all(held):
        raise ValueError(f"{given[~held].flat[0]} is out of its range")
    return array
