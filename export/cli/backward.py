"""The commands ``fewheads language head``, ``export-head``, ``compare``, ``chunks``, ``mismatch``, ``calculator``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from edge.cli.options import FloatRange
from edge.cli.output import json_option, print_json, working
from edge.errors import UsageError
from edge.files import sha256
from export.bundle.exported import print_exported
from export.bundle.outputs import check_bundle, check_name, check_run, check_workspace
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
from export.papers.experiment import SETTINGS
from export.report.table import print_measures
from export.training.loading import loading_torch
from export.training.options import (
    DIRECTORY,
    device_option,
    out_option,
    plots_option,
    precision_option,
    replace_option,
    repository_option,
    seeded,
    seeds_option,
    tensorboard_option,
    version_option,
)
from export.training.provenance import processor
from export.training.watch import watching

# torch takes seconds to import, so only the commands' bodies do it.
if TYPE_CHECKING:
    from export.generate.formats import Example, Source
    from export.generate.model import Base
    from export.generate.train import Corpus
    from export.training.device import DeviceName
    from export.training.recipe import Precision


_seeds_option = click.option(
    "--seeds", type=click.IntRange(1), default=3, show_default=True, help="Runs of each, seeds from 0 on."
)
_resumed_option = out_option("Directory for all results; the same options resume there, with more seeds, too.")


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


@click.command("export-head")
@click.argument("run", type=DIRECTORY)
@click.option(
    "--backbone", required=True, type=DIRECTORY, help="Directory of the language model that the head was trained on."
)
@click.option("--base", required=True, type=DIRECTORY, help="Bundle of that model, of `fewheads language export`.")
@click.option("--name", required=True, help="Name of the bundle.")
@repository_option("it")
@version_option
@replace_option("an existing bundle of that name and version")
@json_option
def export_head(
    run: Path, backbone: Path, base: Path, name: str, repository: Path, version: int, replace: bool, as_json: bool
) -> None:
    """Export a head or a bias to a bundle of its own.

    RUN is one of `fewheads language head`. A server that has loaded it and its base applies it to requests to the base
    that name it as `head`.
    """
    read = {"RUN": run, "--backbone": backbone, "--base": base}
    check_bundle(repository / f"{check_name('--name', name)}-{version}", read, replace=replace)
    with loading_torch():
        from export.bundle.exportable import export_bundle
        from export.generate.model import Base
        from export.papers.backward.bundle import TrainedHead
        from export.papers.backward.training import load_head
        from export.training.runs import METRICS, RunMetrics, decode, read_config

        model = Base(backbone, "cpu")
        measures = decode(run / METRICS, RunMetrics).measures
        made = TrainedHead(load_head(run, model), base, name, model.identity, read_config(run).provenance, measures)
    started = time.perf_counter()
    with working(f"exporting {run}"):
        exported = export_bundle(made, repository, version=version, replace=replace)
    print_exported([(exported, time.perf_counter() - started)], as_json=as_json)


@click.command()
@click.argument("backbone", type=DIRECTORY)
@click.option(
    "--data",
    multiple=True,
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIRECTORY/MODULE",
    help="A task: DIRECTORY has train*/MODULE.txt and interpolate/MODULE.txt of the mathematics dataset. Repeatable.",
)
@_seeds_option
@click.option(
    "--methods",
    "groups",
    multiple=True,
    type=click.Choice(["trained", "rules", "few", "forms"]),
    default=("trained",),
    show_default=True,
    help="Heads and other ways to train; rules to choose tokens; the few that --fewer is for, with examples in the "
    "prompt; variations of the head. Repeatable.",
)
@click.option("--limit", type=click.IntRange(1), default=10_000, show_default=True, help="Examples to train on.")
@click.option(
    "--fewer", type=click.IntRange(1), multiple=True, metavar="N", help="Train on N examples, too. Repeatable."
)
@click.option(
    "--lr", type=FloatRange(0, min_open=True), multiple=True, help="A peak learning rate to try, in place of five."
)
@click.option("--epochs", type=click.IntRange(1), default=2, show_default=True, help="Passes over them.")
@click.option("--items", type=click.IntRange(1), default=300, show_default=True, help="Test examples to answer.")
@_resumed_option
@device_option
@json_option
def compare(
    backbone: Path,
    data: tuple[Path, ...],
    seeds: int,
    groups: tuple[str, ...],
    limit: int,
    fewer: tuple[int, ...],
    lr: tuple[float, ...],
    epochs: int,
    items: int,
    out: Path,
    device: DeviceName,
    as_json: bool,
) -> None:
    """Compare a head of backward attention with simpler methods.

    They improve BACKBONE, a language model. On each task, every way gets the same training data and a learning rate
    chosen on a hold-out, and is scored once on the test split. Writes records.jsonl, a line after each training, and
    report.md.
    """
    inputs = {"BACKBONE": backbone, **{f"--data {path}": path.parent for path in data}}
    check_workspace("--out", out, inputs, settings=SETTINGS)
    names = [path.name for path in data]
    if len({*names}) < len(names):
        fix = "Give each module once."
        raise UsageError("--data", given=", ".join(names), expected="modules of different names", fix=fix)
    if max(fewer, default=0) >= limit:
        fix = "Give smaller numbers, or a larger --limit."
        raise UsageError("--fewer", given=max(fewer), expected=f"less than the --limit of {limit}", fix=fix)
    with loading_torch("loading torch, model and data"):
        from export.generate.model import Base, positions_of
        from export.papers.backward.methods import GROUPS, METHODS, read_task
        from export.papers.backward.run import ComparisonSettings, HeadComparison
        from export.papers.experiment import digest, run_experiment

        base = Base(backbone, device)
        tasks = {path.name: read_task(path, base.tokenizer, positions_of(base.model), limit) for path in data}
    chosen = {name for group in groups for name in GROUPS[group]}
    settings = ComparisonSettings(
        base=base.identity,
        data={path.name: digest(path.parent, f"*/{path.name}.txt") for path in data},
        limit=limit,
        fewer=tuple(sorted({*fewer})),
        epochs=epochs,
        items=items,
        methods=tuple(name for name in METHODS if name in chosen),
        **({"rates": lr} if lr else {}),
        seeds=seeds,
        processor=processor(),
    )
    run_experiment(HeadComparison(settings, out, base, tasks), out, as_json=as_json, plots=False)


@click.command()
@click.option("--vocabulary", type=click.IntRange(1), default=50_257, show_default=True, help="Tokens; GPT-2's.")
@click.option("--width", type=click.IntRange(1), default=768, show_default=True, help="Of embeddings and states.")
@click.option(
    "--chunk",
    "sizes",
    type=click.IntRange(1),
    multiple=True,
    help="Tokens in a chunk. Repeatable.  [default: powers of 2 from 256, and all]",
)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Processes for each size.")
@_resumed_option
@plots_option
@json_option
def chunks(
    vocabulary: int, width: int, sizes: tuple[int, ...], repeats: int, out: Path, plots: bool, as_json: bool
) -> None:
    """Measure the memory of a head's training by chunks of the vocabulary.

    Each step is in a process of its own, with random states and weights. Writes records.jsonl, report.md and a figure.
    """
    check_workspace("--out", out, {}, settings=SETTINGS)
    with loading_torch():
        from export.papers.backward.chunks import ChunkMemory, ChunkSettings
        from export.papers.experiment import compute_parts, report_experiment

    powers = [2**power for power in range(8, 17) if 2**power < vocabulary]
    settings = ChunkSettings(
        vocabulary=vocabulary,
        width=width,
        chunks=(0, *(sizes or (*powers, vocabulary))),
        repeats=repeats,
        processor=processor(),
    )
    experiment = ChunkMemory(settings)
    compute_parts(experiment, out, as_jobs=True, jobs=1)
    report_experiment(experiment, out, plots=plots, as_json=as_json)


@click.command()
@click.argument("backbone", type=DIRECTORY)
@click.option(
    "--data",
    multiple=True,
    default=("calculator:train",),
    show_default=True,
    metavar="FORMAT:PATH",
    help="To train on, as of `fewheads language finetune`; a tenth is held out. Repeatable.",
)
@click.option(
    "--test",
    "tests",
    multiple=True,
    default=("calculator:in_range", "calculator:out_of_range", "calculator:long"),
    show_default=True,
    metavar="FORMAT:PATH",
    help="To answer, beside the data that are trained on. Repeatable.",
)
@_seeds_option
@click.option("--rank", type=click.IntRange(1), default=32, show_default=True, help="Of the adapters; the paper's.")
@click.option("--epochs", type=click.IntRange(1), default=20, show_default=True, help="Passes; the best one is kept.")
@click.option("--lr", type=FloatRange(0, min_open=True), default=RATE, show_default=True, help="Peak learning rate.")
@tuning_precision_option
@limit_option
@_resumed_option
@device_option
@json_option
def mismatch(
    backbone: Path,
    data: tuple[str, ...],
    tests: tuple[str, ...],
    seeds: int,
    rank: int,
    epochs: int,
    lr: float,
    precision: Precision,
    limit: int | None,
    out: Path,
    device: DeviceName,
    as_json: bool,
) -> None:
    """Find what a fine-tuned model loses in use (paper 000).

    Trains LoRA adapters on BACKBONE in FP32 and rounded to NF4. Each is scored on the base of its training and merged
    into the FP32 base, with the begin token once and twice, teacher-forced and written freely. Writes records.jsonl, a
    line after each training, and report.md.
    """
    sources, splits = [source_of(text) for text in data], [source_of(text) for text in tests]
    check_workspace("--out", out, {"BACKBONE": backbone, **files_of([*sources, *splits])}, settings=SETTINGS)
    with loading_torch("loading torch, model and data"):
        from export.papers.backward.mismatch import Mismatch, MismatchSettings, begin_of
        from export.papers.experiment import run_experiment

        base, examples, hashes = _loaded(backbone, device, sources, splits, limit)
    settings = MismatchSettings(
        base=base.identity,
        data=hashes,
        begin=begin_of(base.tokenizer),
        rank=rank,
        epochs=epochs,
        rate=lr,
        precision=precision,
        seeds=seeds,
        processor=processor(),
    )
    run_experiment(Mismatch(settings, out, base, examples), out, as_json=as_json, plots=False)


def _loaded(
    backbone: Path, device: DeviceName, sources: Sequence[Source], splits: Sequence[Source], limit: int | None
) -> tuple[Base, tuple[Corpus, Mapping[str, Sequence[Example]]], dict[str, str]]:
    """Return the model, what it trains and is tested on, and the hashes of these."""
    from export.generate.formats import read_source
    from export.generate.model import Base
    from export.generate.train import read_corpus

    base = Base(backbone, device)
    corpus = read_corpus(sources, seed=0, limit=limit)
    tests = {name: some for source in splits for name, some in read_source(source, limit).items()}
    hashes = {name: sha256(msgspec.json.encode(some)) for name, some in {"train": corpus.train, **tests}.items()}
    return base, (corpus, tests), hashes


@click.command()
@click.argument("backbone", type=DIRECTORY)
@_seeds_option
@click.option("--rank", type=click.IntRange(1), default=32, show_default=True, help="Of the adapters; the paper's.")
@click.option("--epochs", type=click.IntRange(1), default=10, show_default=True, help="Passes; the best one is kept.")
@click.option("--lr", type=FloatRange(0, min_open=True), default=RATE, show_default=True, help="Peak, of adapters.")
@click.option(
    "--full-lr", type=FloatRange(0, min_open=True), default=FULL_RATE, show_default=True, help="Peak, of all weights."
)
@precision_option()
@limit_option
@_resumed_option
@device_option
@json_option
def calculator(
    backbone: Path,
    seeds: int,
    rank: int,
    epochs: int,
    lr: float,
    full_lr: float,
    precision: Precision,
    limit: int | None,
    out: Path,
    device: DeviceName,
    as_json: bool,
) -> None:
    """Fine-tune a language model as a calculator (paper 000).

    Trains all weights of BACKBONE, and LoRA adapters on it, on the calculator's expressions, and counts the right
    answers to others in range, out of range and long. Writes records.jsonl, a line after each training, and report.md.
    """
    check_workspace("--out", out, {"BACKBONE": backbone}, settings=SETTINGS)
    with loading_torch("loading torch, model and data"):
        from export.papers.backward.calculators import CalculatorSettings, FinetunedCalculators
        from export.papers.experiment import run_experiment

        tests = [source_of(f"calculator:{split}") for split in ("in_range", "out_of_range", "long")]
        base, examples, hashes = _loaded(backbone, device, [source_of("calculator:train")], tests, limit)
    settings = CalculatorSettings(
        base=base.identity,
        data=hashes,
        rank=rank,
        epochs=epochs,
        rate=lr,
        full_rate=full_lr,
        precision=precision,
        seeds=seeds,
        processor=processor(),
    )
    run_experiment(FinetunedCalculators(settings, out, base, examples), out, as_json=as_json, plots=False)
