"""The command ``fewheads pack``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import click
import msgspec

from edge.bundles.steps import MOST_BOXES
from edge.cli.options import FloatRange
from edge.cli.output import json_option, print_json, print_table, remark, working
from edge.errors import Raw, UsageError
from export.bundle.pack.boxes import FAMILIES
from export.bundle.pack.bundle import DEFAULT_MAX_BATCH_SIZE, Packed, PackedFile, pack_model
from export.bundle.pack.inputs import RANDOM
from export.bundle.pack.options import PackOptions
from export.bundle.pack.profiles import parse_shapes
from export.training.options import replace_option, repository_option, version_option

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("model", metavar="MODEL.onnx|DIR", type=click.Path(path_type=Path))
@repository_option("the model")
@click.option("--name", help="Name of the model and its bundle.  [required]")
@version_option
@click.option(
    "--max-batch-size",
    type=click.IntRange(0, 4096),
    help="Rows of a run, 0 for no batch. "
    f"Default: {DEFAULT_MAX_BATCH_SIZE} where the first dimension of all tensors is dynamic, else 0.",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="INPUT=MIN:OPT:MAX",
    help="Sizes of an input with dynamic dimensions other than the batch, such as ids=1x1:1x32:8x128; repeatable.",
)
@click.option(
    "--inputs",
    type=_PATH,
    metavar="NPZ|DIR|TXT",
    help="Real golden inputs: an array under the name of each input, with --image a directory of images, or with "
    "--tokenizer a text in each line. Default: random ones, of texts some of ours.",
)
@click.option(
    "--image",
    type=_PATH,
    metavar="JSON",
    help="Clients send JPEG and PNG files, which are read as this preprocessor_config.json of Hugging Face says.",
)
@click.option(
    "--labels",
    type=_PATH,
    metavar="TXT",
    help="Labels of the logits, one in each line; clients may ask for the label and the probabilities.",
)
@click.option(
    "--detect",
    type=click.Choice(list(FAMILIES)),
    help="The model is a detector of this family: with --image, clients get boxes, scores and classes.",
)
@click.option("--threshold", type=FloatRange(0, 1), help="Score that boxes exceed by default.  [default: 0.5]")
@click.option(
    "--top-k",
    type=click.IntRange(1, MOST_BOXES),
    help="Most boxes of a picture by default.  [default: the queries of the model]",
)
@click.option(
    "--tokenizer",
    type=_PATH,
    metavar="DIR",
    help="Clients send texts, which the tokenizer.json of this directory turns into the model's input_ids.",
)
@click.option(
    "--pooling",
    type=click.Choice(["mean", "cls"]),
    help="Make the mean of the tokens' vectors, or that of the first token, the one output, an embedding.",
)
@click.option("--normalize", is_flag=True, help="Give embeddings the length 1.")
@click.option(
    "--max-length",
    type=click.IntRange(3),
    help="Most tokens of a text.  [default: the limit of the tokenizer's directory]",
)
@click.option("--fp16", is_flag=True, help="Add a file in FP16 for TensorRT.")
@click.option("--int8", is_flag=True, help="Add the tier x1-int8, with fixed scales, if it computes about the same.")
@click.option(
    "--calibration",
    type=_PATH,
    metavar="NPZ|DIR|TXT",
    help="Real inputs that set the scales of --int8, other than those of --inputs. Default: the golden inputs. Without "
    "a batch, each array has one more dimension in front, the items.",
)
@click.option(
    "--triton",
    is_flag=True,
    help="DIR is a model repository of Triton: its ONNX models become bundles of their names and versions, or that of "
    "--name alone.",
)
@replace_option("an existing bundle of that name and version")
@json_option
def pack(
    model: Path,
    repository: Path,
    name: str | None,
    version: int,
    shapes: tuple[str, ...],
    triton: bool,
    replace: bool,
    as_json: bool,
    **further: Any,
) -> None:
    """Make a bundle of your own ONNX file.

    DIR is a Hugging Face directory with onnx/model.onnx or model.onnx: its tokenizer.json and the pooling of
    sentence-transformers are taken, too. The golden outputs are those of ONNX Runtime.
    """
    options = PackOptions(shapes=parse_shapes(shapes), **further)
    if triton:
        _pack_repository(model, repository, name, options, version=version, replace=replace, as_json=as_json)
        return
    with _steps(f"packing {model.name}", total=3 + options.fp16 + options.int8) as begin:
        packed = pack_model(model, repository, name, options, version=version, replace=replace, begin=begin)
    if as_json:
        print_json(packed)
        return
    _print(packed, options)


@contextmanager
def _steps(title: str, total: int | None) -> Iterator[Callable[[str], None]]:
    """Show a bar, and yield a function that begins its next step."""
    with working(title, total) as update:
        numbers = count()
        yield lambda step: update(next(numbers), total, step)
        done = next(numbers)
        update(done, done)


def _pack_repository(
    directory: Path,
    repository: Path,
    name: str | None,
    options: PackOptions,
    *,
    version: int,
    replace: bool,
    as_json: bool,
) -> None:
    from export.bundle.pack.triton import pack_repository  # it imports protobuf, which no help needs

    others = {"--version": version != 1, "--max-batch-size": options.max_batch_size is not None}
    for option, is_given in others.items():
        if is_given:
            fix = "Leave it out: the repository says it."
            raise UsageError(option, expected="--triton without it", fix=fix)
    with _steps(f"packing {directory.name}", total=None) as begin:
        every, refused = pack_repository(directory, repository, name, options, replace=replace, begin=begin)
    if as_json:
        print_json(every)
    for packed in () if as_json else every:
        _print(packed, options)
    for one in refused:
        remark(f"{one.model} is left out: {one.error}")
    if refused:
        given, expected = Raw(f"{len(refused)} left out"), "models that bundles can hold"
        fix = "The reasons are above; --name packs one model alone, with the options that it needs."
        raise UsageError(f"models of {directory}", given=given, expected=expected, fix=fix)


def _print(packed: Packed, options: PackOptions) -> None:
    if packed.golden == RANDOM:
        random_scales = options.int8 and options.calibration is None
        ranges = ", and scales of INT8 from random inputs are wrong for real ones" if random_scales else ""
        remark(f"The golden inputs are random: accuracy is not checked{ranges}. Give real ones with --inputs.")
    if packed.only_onnxruntime:
        remark(f"Only ONNX Runtime runs this model, not TensorRT: it has {packed.only_onnxruntime}.")
    if packed.not_taken:
        remark(
            f"{packed.bundle}: a bundle has no place for {', '.join(packed.not_taken)}; see 'fewheads serve --help'."
        )
    batch = f"at most {packed.max_batch_size} rows" if packed.max_batch_size else "no batch"
    title = f"{packed.bundle}: {batch}, {packed.golden_rows} golden rows ({packed.golden})"
    if packed.calibration_items is not None:
        title += f", INT8 calibrated with {packed.calibration_items} inputs"
    columns = [field.replace("size_bytes", "bytes").replace("_", " ") for field in PackedFile.__struct_fields__]
    print_table(title, columns, [msgspec.structs.astuple(file) for file in packed.files])
