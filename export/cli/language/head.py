"""The command ``fewheads language head``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.cli.output import json_option, print_json
from edge.errors import UsageError
from export.bundle.outputs import check_run
from export.generate.formats import source_of
from export.generate.options import data_option, files_of, language_seed_option, limit_option
from export.report.table import print_measures
from export.training.loading import loading_torch
from export.training.options import (
    DIRECTORY,
    device_option,
    out_option,
    replace_option,
    seeded,
    seeds_option,
    tensorboard_option,
)
from export.training.watch import watching

# torch takes seconds to import, so only the command's body does it.
if TYPE_CHECKING:
    from export.training.device import DeviceName


@click.command()
@click.argument("backbone", type=DIRECTORY)
@data_option
@click.option("--dims", type=click.IntRange(1), help="d, of keys and values.  [default: 30]")
@click.option("--heads", type=click.IntRange(1), help="Share the dims.  [default: 1]")
@click.option("--layers", type=click.IntRange(1), help="Follow one another.  [default: 1]")
@click.option("--bias", is_flag=True, help="Train a bias for each token of the vocabulary in place of a head.")
@click.option(
    "--steps", type=click.IntRange(1), default=2000, show_default=True, help="Rounded up to passes over the data."
)
@limit_option
@language_seed_option
@seeds_option
@out_option("Directory for the run. An unfinished run of the same command is resumed.")
@device_option
@tensorboard_option
@replace_option("earlier heads there")
@json_option
def head(
    backbone: Path,
    data: tuple[str, ...],
    dims: int | None,
    heads: int | None,
    layers: int | None,
    bias: bool,
    steps: int,
    limit: int | None,
    seed: int,
    seeds: int,
    out: Path,
    device: DeviceName,
    tensorboard: Path | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Train a head of backward attention, or a bias, on a language model.

    BACKBONE, which stays as it is, is a directory of `fewheads language train`, or a model of GPT-2, Gemma, Llama,
    Mistral or Qwen2 type from Hugging Face. A tenth of the data, 512 examples at most, is held out, chooses the best
    pass, and measures model and head together.
    """
    shape = {name: value for name, value in {"dims": dims, "heads": heads, "layers": layers}.items() if value}
    if bias and shape:
        name, value = next(iter(shape.items()))
        fix = f"Leave --{name} or --bias out."
        raise UsageError(f"--{name}", given=value, expected="no --bias beside it", fix=fix)
    sources = [source_of(text) for text in data]
    runs = {one: out.parent / run for one, run in seeded(out.name, seed, seeds).items()}
    for run in runs.values():
        check_run("--out", run, {"BACKBONE": backbone, **files_of(sources)}, replace=replace)
    with loading_torch("loading torch, model and data"):
        from export.generate.model import Base
        from export.generate.train import read_corpus
        from export.papers.backward.methods import DIMS
        from export.papers.backward.training import new_bias, new_head, train_head
        from export.training.intervals import pooled

        base = Base(backbone, device)
        corpus = read_corpus(sources, seed=seed, limit=limit)
    results = []
    for one, run in runs.items():
        made = new_bias(base) if bias else new_head(base, one, **{"dims": DIMS} | shape)
        with watching(run.name) as watch:
            results.append(
                train_head(made, base, corpus, run, seed=one, steps=steps, tensorboard=tensorboard, observer=watch)
            )
    metrics, directories = pooled(results), list(map(str, runs.values()))
    if as_json:
        print_json({"runs": directories, "base": base.identity, "metrics": metrics})
        return
    print_measures(out.name, ", ".join(directories), metrics)
