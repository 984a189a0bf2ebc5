"""The command ``fewheads language reduce``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.cli.options import FloatRange
from edge.cli.output import json_option, print_json, print_table
from export.generate.files import check_language_model
from export.generate.formats import source_of
from export.generate.options import data_option, files_of, language_seed_option, limit_option
from export.report.table import print_measures
from export.training.loading import loading_torch
from export.training.options import DIRECTORY, device_option, out_option, replace_option
from export.training.watch import watching

# torch takes seconds to import, so only the command's body does it.
if TYPE_CHECKING:
    from export.training.device import DeviceName

_SHARE = FloatRange(0, 1, min_open=True)


@click.command()
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
