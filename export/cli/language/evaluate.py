"""The command ``fewheads language evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.cli.options import FloatRange
from edge.cli.output import json_option, print_json, print_table, progress
from edge.errors import UsageError
from export.generate.formats import read_source, source_of
from export.generate.options import data_option, language_seed_option, limit_option, rows_by_file
from export.training.loading import loading_torch
from export.training.options import DIRECTORY, device_option

# torch takes seconds to import, so only the command's body does it.
if TYPE_CHECKING:
    from edge.bundles.manifest import Measure
    from export.training.device import DeviceName


@click.command()
@click.argument("directory", type=DIRECTORY)
@data_option
@click.option(
    "--head", type=DIRECTORY, metavar="RUN", help="Measure the model with this head, of `fewheads language head`."
)
@click.option("--temperature", type=FloatRange(0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=click.IntRange(0), default=0, show_default=True, help="Draw from so many; 0 is all.")
@click.option("--beams", type=click.IntRange(1), default=1, show_default=True, help="More than 1 is a beam search.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Of a completion; the model's positions limit it, too.",
)
@click.option("--batch", type=click.IntRange(1), default=32, show_default=True, help="Examples at once.")
@limit_option
@language_seed_option
@device_option
@json_option
def evaluate(
    directory: Path,
    data: tuple[str, ...],
    head: Path | None,
    temperature: float,
    top_k: int,
    beams: int,
    max_tokens: int,
    batch: int,
    limit: int | None,
    seed: int,
    device: DeviceName,
    as_json: bool,
) -> None:
    """Measure a language model on each file of the data.

    DIRECTORY is one of `fewheads language train`, or a model of GPT-2, Gemma, Llama, Mistral or Qwen2 type from Hugging
    Face.
    """
    sources = [source_of(text) for text in data]
    if top_k and not temperature:
        fix = "Give --temperature 1, or leave --top-k out."
        raise UsageError("--top-k", given=top_k, expected="--temperature above 0 beside it", fix=fix)
    with loading_torch("loading torch and the model"):
        from export.generate.decoding import Decoding
        from export.generate.evaluate import evaluate as measures_of
        from export.generate.model import Base
        from export.papers.backward.training import load_head

        base = Base(directory, device)
        module = None if head is None else load_head(head, base)
        files = {name: examples for source in sources for name, examples in read_source(source, limit).items()}
    decoding = Decoding(temperature=temperature, top_k=top_k, beams=beams, seed=seed)
    measures: list[Measure] = []
    with progress() as bar, base.revised(module) as model:
        task = bar.add_task(directory.name, total=sum(map(len, files.values())), note="")
        for name, examples in files.items():
            bar.update(task, note=name)
            measures += measures_of(
                model,
                base.tokenizer,
                name,
                examples,
                decoding,
                max_tokens=max_tokens,
                batch_size=batch,
                on_batch=lambda size: bar.advance(task, size),
            )
    if as_json:
        print_json({"model": str(directory), "head": head and str(head), "decoding": decoding, "measures": measures})
    else:
        print_table(str(directory) if head is None else f"{directory} with {head}", *rows_by_file(measures))
