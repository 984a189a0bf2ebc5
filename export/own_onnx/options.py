"""Options and output of ``fewheads export`` for an own ONNX file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from edge.cli.options import grouped_options
from edge.cli.output import print_json, print_table
from edge.errors import Literally, UsageError
from export.own_onnx.bundle import DEFAULT_MAX_BATCH_SIZE, OwnExported, OwnOptions
from export.own_onnx.golden import RANDOM
from export.own_onnx.profiles import parse_shapes

_OPTIONS = (
    click.option(
        "--max-batch-size",
        type=click.IntRange(0, 4096),
        help="Of an ONNX file: rows of a run, 0 for no batch. "
        f"Default: {DEFAULT_MAX_BATCH_SIZE} where the first dimension of all tensors is symbolic, else 0.",
    ),
    click.option(
        "--shape",
        "shapes",
        multiple=True,
        metavar="INPUT=MIN:OPT:MAX",
        help="Of an ONNX file: the sizes of an input with further symbolic dimensions, such as ids=1x1:1x32:8x128.",
    ),
    click.option(
        "--inputs",
        type=click.Path(path_type=Path),
        metavar="NPZ",
        help="Of an ONNX file: real golden inputs, an array under the name of each. Default: random ones.",
    ),
)


def _own(max_batch_size: int | None, shapes: Sequence[str], inputs: Path | None) -> OwnOptions:
    return OwnOptions(max_batch_size, parse_shapes(shapes), inputs)


#: Adds the options of an own ONNX file to a command, which gets all of them as the argument ``own``.
own_onnx_options = grouped_options(_own, "own", _OPTIONS)


def is_own_onnx(runs: Sequence[Path], own: OwnOptions) -> bool:
    """Return whether the command's only argument is an ONNX file.

    Raises:
        UsageError: an ONNX file is one of several arguments, or run directories come with options of an ONNX file.
    """
    files = [run for run in runs if run.suffix == ".onnx"]
    if files and len(runs) > 1:
        given = Literally(", ".join(map(str, runs)))
        fix = "Export each ONNX file with a command of its own."
        raise UsageError("RUN_DIR", given=given, expected="one ONNX file, or run directories alone", fix=fix)
    if not files and own != OwnOptions():
        expected = "an ONNX file (.onnx) with --max-batch-size, --shape or --inputs"
        raise UsageError("RUN_DIR", given=str(runs[0]), expected=expected, fix="Leave these options out for runs.")
    return bool(files)


def refuse_tiers(path: Path, tiers: Sequence[str], artifacts: Sequence[str]) -> None:
    """Refuse the options that only fine-tuned runs have."""
    for option, values in (("--tier-name", tiers), ("--artifacts", artifacts)):
        if values:
            expected = f"no such option for {path}, which becomes one tier for every runtime"
            raise UsageError(option, given=values[0], expected=expected, fix=f"Leave {option} out.")


def print_exported(exported: OwnExported, *, as_json: bool) -> None:
    """Print the bundle that was written."""
    if as_json:
        print_json([exported])
        return
    if exported.golden == RANDOM:
        remark = "A device that passes the golden check repeats the outputs for random inputs; accuracy is not checked."
        click.echo(f"{remark} Give real inputs with --inputs FILE.npz.", err=True)
    columns = ("bundle", "max batch size", "precision", "golden inputs", "golden rows", "ONNX bytes")
    print_table("Exported", columns, [msgspec.structs.astuple(exported)])
