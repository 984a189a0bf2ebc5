"""The command ``fewheads language head``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from edge.cli.options import grouped_options
from edge.cli.output import json_option, print_json
from export.bundle.outputs import check_run, check_workspace
from export.commands.language import data_option, files_of, language_seed_option, limit_option
from export.generate.formats import source_of
from export.loading import loading_torch
from export.measures import print_measures
from export.options import (
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

#: Hidden states that the heads of a directory share.
_STATES = ".states"


class HeadShape(msgspec.Struct, frozen=True):
    """Fields of :class:`export.papers.backward.head.HeadConfig` that do not follow from the language model."""

    dims: int
    heads: int
    latent: int | None
    gated: bool
    layers: int


_SHAPE = (
    click.option("--dims", type=click.IntRange(1), default=30, show_default=True, help="d, of keys and values."),
    click.option("--heads", type=click.IntRange(1), default=1, show_default=True, help="Share the dims."),
    click.option("--latent", type=click.IntRange(1), help="Width of a latent projection.  [default: none]"),
    click.option("--gated", is_flag=True, help="Multiply the latent projection by a SiLU gate."),
    click.option("--layers", type=click.IntRange(1), default=1, show_default=True, help="Follow one another."),
)


@click.command()
@click.argument("backbone", type=DIRECTORY)
@data_option
@grouped_options(HeadShape, "shape", _SHAPE)
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
    shape: HeadShape,
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
    """Train a head of backward attention on BACKBONE, a language model that stays as it is.

    BACKBONE is a directory of `fewheads language train`, or a model of GPT-2, Gemma, Llama, Mistral or Qwen2 type from
    Hugging Face. A tenth of the data, 512 examples at most, is held out, chooses the best pass, and measures model and
    head together. The model's hidden states are computed once and kept in .states beside the runs; delete them at will.
    """
    sources = [source_of(text) for text in data]
    runs = {one: out.parent / run for one, run in seeded(out.name, seed, seeds).items()}
    inputs = {"BACKBONE": backbone, **files_of(sources)}
    for run in runs.values():
        check_run("--out", run, inputs, replace=replace)
    states = out.with_name(_STATES)
    check_workspace("--out", states, inputs, settings="*/targets.npy")
    with loading_torch("loading torch, model and data"):
        from export.generate.base import Base
        from export.generate.train import read_corpus
        from export.papers.backward.training import new_head, train_head
        from export.training.intervals import pooled

        base = Base(backbone, device)
        corpus = read_corpus(sources, seed=seed, limit=limit)
    results = []
    for one, run in runs.items():
        made = new_head(base, one, **msgspec.structs.asdict(shape))
        with watching(run.name) as watch:
            results.append(
                train_head(
                    made,
                    base,
                    corpus,
                    run,
                    states,
                    seed=one,
                    steps=steps,
                    tensorboard=tensorboard,
                    observer=watch,
                )
            )
    metrics, places = pooled(results), ", ".join(map(str, runs.values()))
    if as_json:
        print_json({"runs": list(map(str, runs.values())), "base": base.identity, "metrics": metrics})
        return
    print_measures(out.name, places, metrics)
