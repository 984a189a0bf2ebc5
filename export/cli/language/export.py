"""The command ``fewheads language export``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from edge.cli.output import json_option, working
from export.bundle.exported import print_exported
from export.bundle.outputs import check_bundle, check_name
from export.generate.formats import read_source, source_of
from export.training.loading import loading_torch
from export.training.options import DIRECTORY, replace_option, repository_option, version_option

#: Prompts to choose golden ones from, if there are no data.
_PROMPTS = ("Question: What is 3 + 4?\nAnswer:", "The", "Once upon a time", "1, 2, 3,", "Hello", "In the year 2000")
_MOST_PROMPTS = 12


@click.command()
@click.argument("directory", type=DIRECTORY)
@click.option("--name", required=True, help="Name of the bundle.")
@repository_option("it")
@click.option("--data", multiple=True, metavar="FORMAT:PATH", help="Take golden prompts from there; see `train`.")
@click.option(
    "--positions", type=click.IntRange(2), help="Tokens of prompt and text.  [default: the model's, 1024 at most]"
)
@click.option("--int8", is_flag=True, help="A tier in INT8, too, for ONNX Runtime on the CPU.")
@click.option(
    "--layers-per-block",
    type=click.IntRange(1),
    help="Most layers of an ONNX file, and so of an engine. An Orin Nano builds 6 to 12, as reported.  [default: all]",
)
@version_option
@replace_option("an existing bundle of that name and version")
@json_option
def export(
    directory: Path,
    name: str,
    repository: Path,
    data: tuple[str, ...],
    positions: int | None,
    int8: bool,
    layers_per_block: int | None,
    version: int,
    replace: bool,
    as_json: bool,
) -> None:
    """Export a language model to a bundle that generates text.

    DIRECTORY is one of `fewheads language train`, or a model of GPT-2, Gemma, Llama, Mistral or Qwen2 type from Hugging
    Face. The bundle repeats the texts that transformers generates after some prompts, of the data if given.
    """
    check_bundle(repository / f"{check_name('--name', name)}-{version}", {"DIRECTORY": directory}, replace=replace)
    sources = [source_of(text) for text in data]
    examples = [example for source in sources for of in read_source(source, _MOST_PROMPTS).values() for example in of]
    with loading_torch():
        from export.bundle.exportable import export_bundle
        from export.generate.bundle import LanguageModel
    started = time.perf_counter()
    prompts = [example.text_before for example in examples[:_MOST_PROMPTS]] or _PROMPTS
    with working(f"exporting {directory}"):
        model = LanguageModel(directory, name, prompts, int8, positions, layers_per_block)
        exported = export_bundle(model, repository, version=version, replace=replace)
    print_exported([(exported, time.perf_counter() - started)], as_json=as_json)
