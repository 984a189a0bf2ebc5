"""The command ``fewheads language finetune``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.cli.options import FloatRange
from edge.cli.output import json_option
from edge.errors import UsageError
from export.bundle.outputs import check_name
from export.cli.language.shared import print_trained
from export.generate.files import check_language_model
from export.generate.formats import source_of
from export.generate.options import (
    FULL_RATE,
    RATE,
    data_option,
    files_of,
    language_seed_option,
    limit_option,
    tuning_precision_option,
)
from export.training.loading import loading_torch
from export.training.options import DIRECTORY, device_option, replace_option, runs_option, tensorboard_option
from export.training.watch import watching

# torch takes seconds to import, so only the command's body does it.
if TYPE_CHECKING:
    from export.generate.finetune import BasePrecision
    from export.training.device import DeviceName
    from export.training.recipe import Precision

#: Rank of adapters, unless options say otherwise.
_RANK = 8


@click.command()
@click.argument("name")
@click.option("--backbone", required=True, type=DIRECTORY, help="The model to start from.")
@data_option
@click.option("--rank", type=click.IntRange(1), help=f"Of the adapters.  [default: {_RANK}]")
@click.option("--full", is_flag=True, help="Train all weights in place of adapters.")
@click.option("--epochs", type=click.IntRange(1), default=3, show_default=True, help="Passes; the best one is kept.")
@click.option(
    "--lr",
    type=FloatRange(0, min_open=True),
    help=f"Peak learning rate.  [default: {RATE:g}; {FULL_RATE:g} with --full]",
)
@click.option(
    "--base-precision",
    type=click.Choice(["fp32", "nf4"]),
    default="fp32",
    show_default=True,
    help="Of the frozen weights in training. nf4 rounds them to 4 bits as QLoRA does; the result is in FP32 anyway.",
)
@limit_option
@language_seed_option
@runs_option("the model, which becomes OUT/NAME")
@tuning_precision_option
@device_option
@tensorboard_option
@replace_option("an earlier model of that name")
@json_option
def finetune(
    name: str,
    backbone: Path,
    data: tuple[str, ...],
    rank: int | None,
    full: bool,
    epochs: int,
    lr: float | None,
    base_precision: BasePrecision,
    limit: int | None,
    seed: int,
    out: Path,
    precision: Precision,
    device: DeviceName,
    tensorboard: Path | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Fine-tune a language model on questions and answers, as NAME.

    The model is a directory of `fewheads language train`, or one of GPT-2, Gemma, Llama, Mistral or Qwen2 type from
    Hugging Face. LoRA trains adapters of low rank on all linear layers but the last, and merges them into the model;
    the directory adapter beside it has them in the format of peft. A tenth of the data, 512 examples at most, is held
    out, chooses the best epoch, and measures the merged model.
    """
    directory, sources = out / check_name("NAME", name), [source_of(text) for text in data]
    if full and rank is not None:
        raise UsageError("--rank", given=rank, expected="adapters", fix="Leave --full or --rank out.")
    check_language_model("--out", directory, {"--backbone": backbone, **files_of(sources)}, replace=replace)
    with loading_torch("loading torch, model and data"):
        from export.generate.finetune import Tuning
        from export.generate.finetune import finetune as tune
        from export.generate.model import Base
        from export.generate.train import read_corpus

        rate = lr or (FULL_RATE if full else RATE)
        of_adapters = None if full else rank or _RANK
        tuning = Tuning(rank=of_adapters, base=base_precision, epochs=epochs, rate=rate, precision=precision)
        base = Base(backbone, device)
        corpus = read_corpus(sources, seed=seed, limit=limit)
    with watching(name) as watch:
        metrics = tune(name, base, corpus, tuning, directory, seed=seed, tensorboard=tensorboard, observer=watch)
    print_trained(name, directory, metrics, as_json=as_json, base=base.identity)
