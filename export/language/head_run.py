"""Training of a backward-attention head, from examples to a run directory, and its reading."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from edge.bundles.manifest import Provenance
from edge.errors import Raw
from export.errors import CheckpointError
from export.generate.backbone import positions_of
from export.generate.base import Base, BaseIdentity, LastStates
from export.generate.evaluate import completion_limit, encode_fitting, evaluate
from export.generate.tokenizer import Encoded
from export.generate.train import Corpus
from export.papers.backward.head import BackwardHead, HeadConfig, create
from export.papers.backward.training import HeadObjective, HiddenStates, cached_hidden
from export.training.checkpoint import load, save
from export.training.log import RunFiles
from export.training.objective import SILENT, Observer
from export.training.provenance import processor, provenance
from export.training.recipe import Recipe
from export.training.runs import RunConfig, RunMetrics, read_config
from export.training.trainer import train

#: Name of the model in the record.
MODEL = "backward-head"
#: For heads and controls alike.
RECIPE = Recipe(epochs=1, peak_learning_rate=1e-2, batch_size=256, warmup_share=0.05, schedule="cosine", clip_norm=1.0)


def new_head(base: Base, seed: int, **shape: Any) -> BackwardHead:
    """Return a head with random weights on a model's device.

    Args:
        shape: fields of :class:`export.papers.backward.head.HeadConfig`, without those that follow from the model.
    """
    config = HeadConfig(vocabulary=base.vocabulary, width=base.width, **shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BackwardHead(config, base.embeddings).to(base.device)


def states_of(base: Base, directory: Path, rows: dict[str, list[Encoded]]) -> dict[str, HiddenStates]:
    """Return the hidden states of examples as tokens, by name; they are kept below the directory."""
    last = LastStates(base.model)
    return {name: cached_hidden(directory, last, some, name=base.identity.sha256) for name, some in rows.items()}


def train_head(
    head: BackwardHead,
    base: Base,
    corpus: Corpus,
    directory: str | Path,
    states: Path,
    *,
    seed: int,
    steps: int,
    tensorboard: Path | None = None,
    observer: Observer = SILENT,
) -> RunMetrics:
    """Train a head, measure it on the hold-out, and write its run directory.

    The metrics are those of :func:`export.generate.evaluate.evaluate`, of the model with the head. The state of an
    unfinished run is kept beside the directory; the same call resumes from it.

    Args:
        directory: path of the run; an earlier run there is replaced when this one is done.
        states: directory for the hidden states, which further heads on the same examples use, too.
        seed: of the order of the states.
        steps: rounded up to whole passes over the states.

    Raises:
        TrainingError: the loss is no longer a finite number.
        DataError: no example fits into the model.
    """
    directory = Path(directory)
    positions = positions_of(base.model)
    train_rows, holdout = (encode_fitting(base.tokenizer, part, positions) for part in (corpus.train, corpus.holdout))
    cached = states_of(base, states, {"train": train_rows, "holdout": holdout})
    objective = HeadObjective(
        head, base.read_out, cached["train"], cached["holdout"], seed=seed, batch_size=RECIPE.batch_size
    )
    recipe = replace(RECIPE, epochs=-(-steps // objective.steps_per_epoch))
    files = RunFiles(directory, tensorboard)
    trained = train(objective, recipe, seed=seed, state=files.state, log=files.log, observer=observer)
    with base.revised(head) as model:
        limit = completion_limit(train_rows)
        measures = evaluate(model, base.tokenizer, "holdout", corpus.holdout, max_tokens=limit)
    metrics = RunMetrics(
        head.parameter_count,
        len(trained.scores),
        trained.best_epoch,
        trained.seconds,
        measures,
        trained.losses,
        trained.scores,
    )
    left_out = len(corpus.train) + len(corpus.holdout) - len(train_rows) - len(holdout)
    data = f"{corpus.described}; {len(train_rows)} trained on, {left_out} with more than {positions} tokens left out"
    record = provenance(trainer=f"{trained.steps} steps, {recipe}", data=data, seed=seed)
    save_head(directory, head, base, record, metrics, files.finished())
    files.remove()
    return metrics


def save_head(
    directory: Path,
    head: BackwardHead,
    base: Base,
    record: Provenance,
    metrics: RunMetrics,
    further: dict[str, bytes] | None = None,
) -> None:
    """Write a run directory, whose configuration has the identity of the language model.

    Args:
        further: contents by file name.
    """
    arguments = {"config": msgspec.to_builtins(head.config), "base": msgspec.to_builtins(base.identity)}
    config = RunConfig(MODEL, arguments, record, precision="fp32", processor=processor())
    save(directory, head, config, metrics, further)


def load_head(directory: str | Path, base: Base) -> BackwardHead:
    """Read a head of a language model from a run directory, in evaluation mode on the model's device.

    Raises:
        CheckpointError: the directory is no whole run of a head, or one of another language model.
    """
    config = read_config(directory)
    if config.model == MODEL:
        try:
            found = msgspec.convert(config.arguments.get("base"), BaseIdentity)
        except msgspec.ValidationError as error:
            raise _foreign(directory, error, "the identity of its language model") from None
        if found.sha256 != base.identity.sha256:
            expected = f"a head of {_described(base.identity)}"
            raise _foreign(directory, f"a head of {_described(found)}", expected)
    head, _, _ = load(directory, {MODEL: partial(create, base.embeddings)})
    return head.to(base.device)


def _described(identity: BaseIdentity) -> str:
    return f"{identity.name} with SHA-256 {identity.sha256[:12]}…"


def _foreign(directory: str | Path, given: object, expected: str) -> CheckpointError:
    fix = "Give the head's own language model, or train a head for this one."
    return CheckpointError(f"head {directory}", given=Raw(given), expected=expected, fix=fix)
