"""The command ``fewheads language train``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.cli.output import json_option
from edge.errors import UsageError
from export.bundle.outputs import check_name
from export.cli.language.shared import print_trained
from export.generate.files import check_language_model
from export.generate.formats import source_of
from export.generate.options import data_option, files_of, language_seed_option, limit_option
from export.training.loading import loading_torch
from export.training.options import device_option, precision_option, replace_option, runs_option, tensorboard_option
from export.training.watch import watching

# torch takes seconds to import, so only the command's body does it.
if TYPE_CHECKING:
    from export.generate.train import Size
    from export.training.device import DeviceName
    from export.training.recipe import Precision


@click.command()
@click.argument("name")
@data_option
@click.option(
    "--size",
    type=click.Choice(["tiny", "small", "gpt2"]),
    default="small",
    show_default=True,
    help="1 million parameters and an hour of a core, GPT-2's 124 million for a GPU, or a tiny one to try it.",
)
@click.option(
    "--tokenizer",
    default="bpe",
    show_default=True,
    metavar="bpe|characters|gpt2|DIRECTORY",
    help="Trained on the data, GPT-2's own, or that of another model.",
)
@click.option(
    "--vocabulary", type=click.IntRange(1), help="Tokens of a new BPE.  [default: 2048; tiny 512, gpt2 50257]"
)
@click.option("--steps", type=click.IntRange(1), help="Of the training.  [default: 10000; tiny 200, gpt2 20000]")
@limit_option
@language_seed_option
@runs_option("the model, which becomes OUT/NAME")
@precision_option(
    default="fp32",
    help="Precision of the multiplications; auto is bf16 where the device has instructions for it, which suits gpt2.",
)
@device_option
@tensorboard_option
@replace_option("an earlier model of that name")
@json_option
def train(
    name: str,
    data: tuple[str, ...],
    size: Size,
    tokenizer: str,
    vocabulary: int | None,
    steps: int | None,
    limit: int | None,
    seed: int,
    out: Path,
    precision: Precision,
    device: DeviceName,
    tensorboard: Path | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Train a language model NAME on questions and answers.

    A tenth of the data, 512 examples at most, is held out, chooses the best epoch, and measures it. The result is a
    directory that transformers loads, too, with metrics.json, training.json and log.jsonl beside the model.
    """
    directory, sources = out / check_name("NAME", name), [source_of(text) for text in data]
    if vocabulary and tokenizer != "bpe":
        raise UsageError("--vocabulary", given=vocabulary, expected="--tokenizer bpe", fix="Leave --vocabulary out.")
    of_tokenizer = None if tokenizer in {"bpe", "characters", "gpt2"} else Path(tokenizer)
    check_language_model("--out", directory, {"--tokenizer": of_tokenizer, **files_of(sources)}, replace=replace)
    with loading_torch("loading torch and data"):
        from export.generate.train import preset_of, read_corpus, tokenizer_for, train_language

        preset = preset_of(size, steps=steps, precision=precision)
        corpus = read_corpus(sources, seed=seed, limit=limit)
        made = tokenizer_for(corpus, tokenizer, vocabulary or preset.vocabulary)
    with watching(name) as watch:
        metrics = train_language(
            name, corpus, made, preset, directory, seed=seed, device=device, tensorboard=tensorboard, observer=watch
        )
    print_trained(name, directory, metrics, as_json=as_json)
