"""The command ``fewheads import``."""

from __future__ import annotations

from pathlib import Path

import click

from edge.cli.output import json_option, print_json, print_table, remark, working
from export.bundle.outputs import check_run
from export.training.loading import loading_torch
from export.training.options import DIRECTORY, imported_data_option, out_option, replace_option


@click.command("import")
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@out_option("The new run directory.")
@imported_data_option
@click.option("--pair", is_flag=True, help="The classifier reads two texts together.")
@click.option(
    "--no-answer", is_flag=True, help="The model says where a context has no answer, as models for SQuAD 2.0 do."
)
@click.option(
    "--max-length", type=click.IntRange(8), help="Most tokens of a text.  [default: the limit of the directory]"
)
@replace_option("an earlier run at --out")
@json_option
def import_(
    directory: Path,
    out: Path,
    data: Path | None,
    pair: bool,
    no_answer: bool,
    max_length: int | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Turn a Hugging Face directory into a run.

    DIR has a classifier of texts, tokens or images, a model that answers questions, a pretrained encoder of texts,
    which becomes one that embeds sentences, or a sentence-transformers directory, of BERT, RoBERTa, XLM-RoBERTa, MPNet,
    DistilBERT or ViT type, in the safetensors format. The run is compared with transformers or sentence-transformers
    where they are installed. `fewheads reduce` and `export` take it.
    """
    check_run("--out", out, {"DIR": directory, "--data": data}, replace=replace)
    with loading_torch():
        from export.importing.run import import_run
    with working(f"importing {directory}"):
        imported = import_run(directory, out, data=data, pair=pair, no_answer=no_answer, max_length=max_length)
    if imported.missing:
        remark(
            f"{directory}: not compared with the original, because {imported.missing} is not installed. "
            f"pip install {imported.missing}, and import again with --replace to compare."
        )
    if as_json:
        print_json(imported)
        return
    columns = ("task", "labels", "outputs", "tokens at most", "parameters", "compared with", "largest difference")
    labels = ", ".join(imported.labels[:8]) + (" …" if len(imported.labels) > 8 else "")
    parity = imported.parity
    compared = (parity.library, parity.largest_difference) if parity else ("nothing", None)
    row = (imported.task, labels, imported.width, imported.max_length, imported.parameters, *compared)
    print_table(f"Imported {directory} to {imported.run}", columns, [row])
