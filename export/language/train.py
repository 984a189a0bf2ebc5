"""Training of a language model, from data sets to a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn

from export.errors import DataError
from export.generate.backbone import new_gpt2, positions_of, save_backbone
from export.generate.evaluate import completion_limit, encode_fitting, evaluate
from export.generate.files import TRAINING
from export.generate.formats import Example, Source, read_source
from export.generate.objective import LanguageObjective
from export.generate.recipes import Plan
from export.generate.tokenizer import TextTokenizer, gpt2_bpe, train_bpe, train_characters
from export.training.device import DeviceName, device_of
from export.training.log import RunFiles
from export.training.objective import SILENT, Observer
from export.training.provenance import processor, provenance
from export.training.recipe import Recipe
from export.training.runs import METRICS, RunConfig, RunMetrics
from export.training.trainer import train

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Examples that are held out, at most; a tenth of fewer.
HOLDOUT = 512
#: Name of the model in the record.
MODEL = "gpt2-language-model"
#: Examples that a tokenizer is trained on, at most.
_TOKENIZER_EXAMPLES = 100_000


class Corpus(NamedTuple):
    """Examples to train on.

    Attributes:
        train: in the order of their files.
        holdout: drawn from all files alike, of questions that are not in ``train``.
        described: where they come from, for people.
    """

    train: tuple[Example, ...]
    holdout: tuple[Example, ...]
    described: str


def read_corpus(sources: Sequence[Source], *, seed: int, limit: int | None = None) -> Corpus:
    """Return the examples of all sources, of which some are held out; the seed draws them.

    Args:
        limit: examples of each file, at most.

    Raises:
        DataError: a source is missing or malformed, or there are fewer than two different questions.
    """
    examples = [one for source in sources for file in read_source(source, limit).values() for one in file]
    order = np.random.default_rng(seed).permutation(len(examples))
    chosen = [examples[place] for place in order[: max(1, min(HOLDOUT, len(examples) // 10))]]
    questions = {example.prompt for example in chosen}
    train = tuple(example for example in examples if example.prompt not in questions)
    described = ", ".join(map(str, sources))
    if not train:
        expected = "two or more different questions, of which one is held out"
        raise DataError(f"data {described}", given=len(examples), expected=expected, fix="Give more data.")
    return Corpus(train, tuple(chosen), f"{len(examples)} examples of {described}")


def tokenizer_for(corpus: Corpus, name: str, vocabulary: int) -> TextTokenizer:
    """Return a tokenizer: ``bpe`` or ``characters``, trained on a corpus, ``gpt2``, or that of a model's directory.

    Args:
        vocabulary: of ``bpe``.

    Raises:
        UsageError: it cannot be had.
        CheckpointError: the file is malformed.
    """
    every = -(-len(corpus.train) // _TOKENIZER_EXAMPLES)
    texts = (example.text_before + example.completion for example in corpus.train[::every])
    if name == "bpe":
        return train_bpe(texts, vocabulary)
    if name == "characters":
        return train_characters(texts)
    return gpt2_bpe() if name == "gpt2" else TextTokenizer.load(name)


def train_language(
    name: str,
    corpus: Corpus,
    tokenizer: TextTokenizer,
    plan: Plan,
    directory: str | Path,
    *,
    seed: int,
    device: DeviceName = "cpu",
    tensorboard: Path | None = None,
    observer: Observer = SILENT,
) -> RunMetrics:
    """Train a model of GPT-2's architecture, measure it on the hold-out, and write its directory.

    The directory has the files of a Hugging Face model, ``metrics.json``, ``training.json`` and ``log.jsonl``. The
    state of an unfinished run is kept beside it; the same call resumes from it. Examples with more tokens than the
    model has positions are left out.

    Args:
        directory: path of the model; an earlier one there is replaced when this one is done.
        seed: of the initial weights and of the order of examples.

    Raises:
        TrainingError: the loss is no longer a finite number.
        DataError: no example fits.
        UsageError: there is no such device, or transformers is not installed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = new_gpt2(tokenizer.size, plan.dim, plan.layers, plan.heads, plan.positions, end=tokenizer.end)
    model.to(device_of(device))  # type: ignore[arg-type]
    return train_to_directory(
        model,
        corpus,
        tokenizer,
        plan.recipe,
        directory,
        seed=seed,
        steps_per_epoch=plan.steps_per_epoch,
        kind=MODEL,
        arguments={"name": name, "plan": msgspec.to_builtins(plan), "vocabulary": tokenizer.size},
        tensorboard=tensorboard,
        observer=observer,
        finish=lambda: (model, {}),
    )


def train_to_directory(
    model: nn.Module,
    corpus: Corpus,
    tokenizer: TextTokenizer,
    recipe: Recipe,
    directory: str | Path,
    *,
    seed: int,
    steps_per_epoch: int | None = None,
    kind: str,
    arguments: dict[str, Any],
    tensorboard: Path | None,
    observer: Observer,
    finish: Callable[[], tuple[PreTrainedModel, dict[str, bytes]]],
) -> RunMetrics:
    """Train the parameters of a model that are not frozen; the rest is as in :func:`train_language`.

    Args:
        steps_per_epoch: None is a pass over the examples.
        kind: name of the model in the record, ``arguments`` are its further fields.
        finish: returns, after the training, the model to measure and to write, and further files beside it.
    """
    directory = Path(directory)
    files = RunFiles(directory, tensorboard)
    positions = positions_of(model)  # type: ignore[arg-type]
    rows, holdout = (encode_fitting(tokenizer, part, positions) for part in (corpus.train, corpus.holdout))
    objective = LanguageObjective(
        model,
        rows,
        holdout,
        seed=seed,
        batch_size=recipe.batch_size,
        steps_per_epoch=steps_per_epoch or -(-len(rows) // recipe.batch_size),
        precision=recipe.precision,
    )
    trained = train(objective, recipe, seed=seed, state=files.state, log=files.log, observer=observer)
    finished, further = finish()
    measures = evaluate(finished, tokenizer, "holdout", corpus.holdout, max_tokens=completion_limit(rows))
    metrics = RunMetrics(
        finished.num_parameters(),
        len(trained.scores),
        trained.best_epoch,
        trained.seconds,
        measures,
        trained.losses,
        trained.scores,
    )
    left_out = len(corpus.train) + len(corpus.holdout) - len(rows) - len(holdout)
    data = f"{corpus.described}; {len(rows)} trained on, {left_out} with more than {positions} tokens left out"
    config = RunConfig(
        kind,
        arguments,
        provenance(trainer=f"{trained.steps} steps, {recipe}", data=data, seed=seed),
        precision=recipe.precision,
        processor=processor(),
    )
    records = {TRAINING: _encode(config), METRICS: _encode(metrics), **files.finished()}
    save_backbone(finished.cpu(), tokenizer, directory, {**records, **further})
    files.remove()
    return metrics


def _encode(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
