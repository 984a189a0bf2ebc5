"""What several commands of ``fewheads language`` share: options, data and output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from edge.cli.output import print_json
from edge.files import sha256
from export.report.table import print_measures
from export.training.options import out_option

# torch takes seconds to import, so only the commands' bodies do it.
if TYPE_CHECKING:
    from export.generate.formats import Example, Source
    from export.generate.model import Base
    from export.generate.train import Corpus
    from export.training.device import DeviceName
    from export.training.runs import RunMetrics

experiment_seeds_option = click.option(
    "--seeds", type=click.IntRange(1), default=3, show_default=True, help="Runs of each, seeds from 0 on."
)
#: Rank of the adapters in paper 000.
paper_rank_option = click.option(
    "--rank", type=click.IntRange(1), default=32, show_default=True, help="Of the adapters; the paper's."
)
resumed_option = out_option("Directory for all results; the same options resume there, with more seeds, too.")


def print_trained(name: str, directory: Path, metrics: RunMetrics, *, as_json: bool, **further: Any) -> None:
    """Print the measures of a model that was trained, and with ``as_json`` what further is known of it."""
    if as_json:
        print_json({"model": str(directory), **further, "metrics": metrics})
    else:
        print_measures(name, str(directory), metrics)


def loaded(
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
