"""The group ``fewheads language``, with the commands that train, fine-tune, measure, reduce and export a model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge.cli.options import FloatRange
from edge.cli.output import json_option, print_json, print_table, progress, working
from edge.errors import UsageError
from export.bundle.exported import print_exported
from export.bundle.outputs import check_bundle, check_name, check_run
from export.cli.backward import calculator, chunks, compare, export_head, head, mismatch
from export.generate.files import check_language_model
from export.generate.formats import read_source, source_of
from export.generate.options import (
    FULL_RATE,
    RATE,
    data_option,
    files_of,
    language_seed_option,
    limit_option,
    rows_by_file,
    tuning_precision_option,
)
from export.report.table import print_measures
from export.training.loading import loading_torch
from export.training.options import (
    DIRECTORY,
    device_option,
    out_option,
    precision_option,
    replace_option,
    repository_option,
    runs_option,
    tensorboard_option,
    version_option,
)
from export.training.watch import watching

# torch takes seconds to import, so only the commands' bodies do it.
if TYPE_CHECKING:
    from edge.bundles.manifest import Measure
    from export.generate.finetune import BasePrecision
    from export.generate.train import Size
    from export.training.device import DeviceName
    from export.training.recipe import Precision
    from export.training.runs import RunMetrics

#: Rank of adapters, unless options say otherwise.
_RANK = 8
#: Prompts to choose golden ones from, if there are no data.
_PROMPTS = ("Question: What is 3 + 4?\nAnswer:", "The", "Once upon a time", "1, 2, 3,", "Hello", "In the year 2000")
_MOST_PROMPTS = 12
_SHARE = FloatRange(0, 1, min_open=True)


@click.group()
def language() -> None:
    """Train, fine-tune, measure, reduce and export language models."""


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
        from export.generate.train import preset_of, read_corpus, tokenizer_for, train_language

        preset = preset_of(size, steps=steps, precision=precision)
        corpus = read_corpus(sources, seed=seed, limit=limit)
        made = tokenizer_for(corpus, tokenizer, vocabulary or preset.vocabulary)
    with watching(name) as watch:
        metrics = train_language(
            name, corpus, made, preset, directory, seed=seed, device=device, tensorboard=tensorboard, observer=watch
        )
    _print_trained(name, directory, metrics, as_json=as_json)


@language.command()
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
    _print_trained(name, directory, metrics, as_json=as_json, base=base.identity)


def _print_trained(name: str, directory: Path, metrics: RunMetrics, *, as_json: bool, **further: Any) -> None:
    if as_json:
        print_json({"model": str(directory), **further, "metrics": metrics})
    else:
        print_measures(name, str(directory), metrics)


@language.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@out_option("Directory for the model.")
@json_option
def dequantize(file: Path, out: Path, as_json: bool) -> None:
    """Make a model that can be fine-tuned of a GGUF file.

    The weights in FILE have a few bits each, and get as many as torch computes with. They are not the published ones,
    and config.json of the model, and of all that are made from it, says so.
    """
    check_run("--out", out, {"FILE": file}, replace=False)
    with loading_torch():
        from export.generate.gguf import dequantize as dequantized
    with working(f"reading {file}"):
        origin = dequantized(file, out)
    if as_json:
        print_json({"model": str(out), "dequantized_from": origin})
    else:
        click.echo(f"{out}: {origin}")


@language.command()
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


@language.command()
@click.argument("source", metavar="DIRECTORY", type=DIRECTORY)
@data_option
@click.option(
    "--heads",
    type=_SHARE,
    default=1.0,
    show_default=True,
    help="Share of the attention heads that stay; where heads share keys and values, they stay or go together.",
)
@click.option("--neurons", type=_SHARE, default=1.0, show_default=True, help="Share of the FFN neurons that stay.")
@click.option("--texts", type=click.IntRange(1), default=512, show_default=True, help="Texts for the calibration.")
@limit_option
@language_seed_option
@out_option("Directory for the new model.")
@device_option
@replace_option("an earlier model there")
@json_option
def reduce(
    source: Path,
    data: tuple[str, ...],
    heads: float,
    neurons: float,
    texts: int,
    limit: int | None,
    seed: int,
    out: Path,
    device: DeviceName,
    replace: bool,
    as_json: bool,
) -> None:
    """Remove heads and neurons that a language model needs least.

    They are attention heads and FFN neurons of the model in DIRECTORY, chosen by the data. What stays is fitted to the
    outputs of the original. The new model keeps its shapes, with zeros for what was removed, so that transformers loads
    it; `export` drops the zeros. A tenth of the data, 512 examples at most, is held out and measures the model before
    and after.
    """
    sources = [source_of(text) for text in data]
    check_language_model("--out", out, {"DIRECTORY": source, **files_of(sources)}, replace=replace)
    with loading_torch("loading torch, model and data"):
        from export.generate.reduce import reduce_directory
        from export.generate.train import read_corpus

        corpus = read_corpus(sources, seed=seed, limit=limit)
    with watching(out.name, lines=False) as watch:
        reduced = reduce_directory(
            source,
            corpus,
            out,
            heads,
            neurons,
            texts=texts,
            seed=seed,
            device=device,
            on_part=watch.on_part,
        )
    if as_json:
        print_json(reduced)
        return
    rows = [
        (of.number, of.plan.shape.num_heads, of.plan.shape.ffn_dim, of.attention_error, of.feed_forward_error)
        for of in reduced.layers
    ]
    columns = ("layer", "heads", "neurons", "attention's error", "feed-forward's error")
    print_table(f"Reduced {source}", columns, rows)
    print_measures(out.name, reduced.directory, reduced.metrics)


@language.command()
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


for _command in (head, compare, chunks, mismatch, calculator, export_head):
    language.add_command(_command)
