"""The commands ``fewheads language train`` and ``fewheads language evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.cli.output import json_option, print_json, progress
from edge.errors import UsageError
from export.bundle.outputs import check_name
from export.generate.files import check_language_model
from export.generate.formats import Source, source_of
from export.generate.table import print_files
from export.loading import loading_torch
from export.measures import print_measures
from export.options import (
    DIRECTORY,
    device_option,
    precision_option,
    replace_option,
    runs_option,
    seed_option,
    tensorboard_option,
)
from export.training.watch import watching

# torch takes seconds to import, so only the commands' bodies do it.
if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge.bundles.manifest import Measure
    from export.generate.recipes import Size
    from export.training.device import DeviceName
    from export.training.recipe import Precision

data_option = click.option(
    "--data",
    "data",
    multiple=True,
    required=True,
    metavar="FORMAT:PATH",
    help="gsm8k:FILE, openmath:FILE_OR_DIRECTORY, mathematics:FILE_OR_DIRECTORY, or calculator:SPLIT. Repeatable.",
)
limit_option = click.option("--limit", type=click.IntRange(1), help="Examples of each file, at most.  [default: all]")
language_seed_option = seed_option("Of everything that is drawn.")


def files_of(sources: Sequence[Source]) -> dict[str, Path]:
    """Return the files and directories of data, by the option that names each; a calculator has none."""
    return {f"--data {one}": Path(one.path) for one in sources if one.format != "calculator"}


@click.group()
def language() -> None:
    """Train, fine-tune, reduce, evaluate and export language models, and heads on them."""


@language.command()
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
    check_language_model("--out", directory, files_of(sources), replace=replace)
    with loading_torch("loading torch and data"):
        from export.generate.recipes import plan_of
        from export.generate.train import read_corpus, tokenizer_for, train_language

        plan = plan_of(size, steps=steps, precision=precision)
        corpus = read_corpus(sources, seed=seed, limit=limit)
        made = tokenizer_for(corpus, tokenizer, vocabulary or plan.vocabulary)
    with watching(name) as watch:
        metrics = train_language(
            name, corpus, made, plan, directory, seed=seed, device=device, tensorboard=tensorboard, observer=watch
        )
    if as_json:
        print_json({"model": str(directory), "metrics": metrics})
        return
    print_measures(name, str(directory), metrics)


@language.command()
@click.argument("directory", type=DIRECTORY)
@data_option
@click.option(
    "--head", type=DIRECTORY, metavar="RUN", help="Measure the model with this head, of `fewheads language head`."
)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0 is greedy.")
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
    """Measure the language model in DIRECTORY on each file of the data.

    DIRECTORY is one of `fewheads language train`, or a model of GPT-2, Gemma, Llama, Mistral or Qwen2 type from Hugging
    Face.
    """
    sources = [source_of(text) for text in data]
    if top_k and not temperature:
        fix = "Give --temperature 1, or leave --top-k out."
        raise UsageError("--top-k", given=top_k, expected="--temperature above 0 beside it", fix=fix)
    with loading_torch("loading torch and the model"):
        from export.generate.base import Base
        from export.generate.decoding import Decoding
        from export.generate.evaluate import evaluate as measures_of
        from export.generate.formats import read_source
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
        return
    print_files(str(directory) if head is None else f"{directory} with {head}", measures)
