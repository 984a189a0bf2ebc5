"""Training of a language model, from data sets to a Hugging Face directory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional

from export.data.tokens import batches_of_passes
from export.errors import DataError
from export.generate.evaluate import (
    TextBatch,
    completion_limit,
    encode_fitting,
    evaluate,
    learnt_logits,
    padded,
    teacher_forced,
)
from export.generate.files import TRAINING
from export.generate.formats import Example, Source, read_source
from export.generate.model import new_gpt2, positions_of, save_backbone
from export.generate.tokenizer import EncodedExample, TextTokenizer, gpt2_bpe, train_bpe, train_characters
from export.training.checkpoint import fingerprint
from export.training.device import DeviceName, device_of, model_device
from export.training.log import RunFiles
from export.training.objective import SILENT, EpochScore, Observer
from export.training.provenance import processor, provenance
from export.training.recipe import Precision, Recipe
from export.training.runs import METRICS, RunConfig, RunMetrics
from export.training.trainer import train

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Size = Literal["tiny", "small", "gpt2"]
#: Examples that are held out, at most; a tenth of fewer.
HOLDOUT = 512
#: Name of the model in the record.
MODEL = "gpt2-language-model"
#: Examples that a tokenizer is trained on, at most.
_TOKENIZER_EXAMPLES = 100_000
#: The most steps between two scores.
_STEPS_PER_EPOCH = 500
_WARMUP_STEPS = 200


class Preset(msgspec.Struct, frozen=True):
    """The shape of a model of GPT-2's architecture, and its training.

    Attributes:
        positions: the most tokens of a text.
        vocabulary: of a BPE that is trained for it.
        steps: of the training, in epochs of equal length.
    """

    dim: int
    layers: int
    heads: int
    positions: int
    vocabulary: int
    steps: int
    recipe: Recipe


_MUON = Recipe(
    epochs=1,
    optimizer="muon",
    peak_learning_rate=5e-3,
    batch_size=64,
    schedule="cosine",
    final_share=0.05,
    betas=(0.9, 0.95),
    clip_norm=1.0,
)
_ADAMW = replace(_MUON, optimizer="adamw", peak_learning_rate=6e-4, weight_decay=0.1, final_share=0.1)
#: tiny is for tests; small takes two cores an hour; gpt2 has GPT-2's 124 million parameters and its published rate.
_PRESETS: Mapping[Size, Preset] = {
    "tiny": Preset(dim=32, layers=2, heads=2, positions=128, vocabulary=512, steps=200, recipe=_MUON),
    "small": Preset(dim=128, layers=4, heads=4, positions=512, vocabulary=2048, steps=10_000, recipe=_MUON),
    "gpt2": Preset(dim=768, layers=12, heads=12, positions=1024, vocabulary=50_257, steps=20_000, recipe=_ADAMW),
}


def preset_of(size: Size, *, steps: int | None = None, precision: Precision = "fp32") -> Preset:
    """Return the preset of a size, with so many steps, or up to a hundredth fewer."""
    preset = _PRESETS[size]
    steps = steps or preset.steps
    epochs = -(-steps // _STEPS_PER_EPOCH)
    steps = steps // epochs * epochs
    warmup_share = min(0.1, _WARMUP_STEPS / steps)
    recipe = replace(preset.recipe, epochs=epochs, warmup_share=warmup_share, precision=precision)
    return replace(preset, steps=steps, recipe=recipe)


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

    def encoded(
        self, tokenizer: TextTokenizer, positions: int
    ) -> tuple[list[EncodedExample], list[EncodedExample], str]:
        """Return both parts as tokens, without the examples that do not fit, and a description of what is trained on.

        Raises:
            DataError: no example of a part fits into so many positions.
        """
        train, holdout = (encode_fitting(tokenizer, part, positions) for part in (self.train, self.holdout))
        out = len(self.train) + len(self.holdout) - len(train) - len(holdout)
        said = f"{self.described}; {len(train)} trained on, {out} with more than {positions} tokens left out"
        return train, holdout, said


def read_corpus(sources: Sequence[Source], *, seed: int, limit: int | None = None) -> Corpus:
    """Return the examples of all sources, of which some are held out; the seed draws them.

    Args:
        limit: examples of each file, at most.

    Raises:
        DataError: a source is missing or malformed, or there are fewer than two different questions.
    """
    examples = [example for source in sources for file in read_source(source, limit).values() for example in file]
    order = np.random.default_rng(seed).permutation(len(examples))
    chosen = [examples[number] for number in order[: max(1, min(HOLDOUT, len(examples) // 10))]]
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
        UsageError: ``vocabulary`` is too small, or a package is not installed.
        CheckpointError: the file is malformed.
    """
    every = -(-len(corpus.train) // _TOKENIZER_EXAMPLES)
    texts = (example.text_before + example.completion for example in corpus.train[::every])
    if name == "bpe":
        return train_bpe(texts, vocabulary)
    if name == "characters":
        return train_characters(texts)
    return gpt2_bpe() if name == "gpt2" else TextTokenizer.load(name)


class LanguageObjective:
    """An :class:`export.training.objective.Objective`: cross-entropy of the tokens that are learnt, per token.

    Args:
        model: a causal language model of the package transformers.
        train: rows to train on, in passes of a new random order.
        holdout: rows for the score, the perplexity of their tokens that are learnt.
        seed: of the orders.
        steps_per_epoch: batches of an epoch of the trainer, whatever the length of a pass; None is one pass.
    """

    rates: Mapping[nn.Parameter, float] = {}

    def __init__(
        self,
        model: nn.Module,
        train: Sequence[EncodedExample],
        holdout: Sequence[EncodedExample],
        recipe: Recipe,
        *,
        seed: int,
        steps_per_epoch: int | None = None,
    ) -> None:
        self.model, self._train, self._holdout = model, train, holdout
        self._seed, self._batch_size, self._precision = seed, recipe.batch_size, recipe.precision
        self.steps_per_epoch = steps_per_epoch or -(-len(train) // recipe.batch_size)
        self._device = model_device(model)

    def fingerprint(self) -> str:
        """Return a hash of the initial weights, all rows, and the settings."""
        rows = [array for row in (*self._train, *self._holdout) for array in row]
        settings = f"{len(self._train)} {self._seed} {self._batch_size} {self.steps_per_epoch}"
        return fingerprint([self.model], rows, settings)

    def batches(self, epoch: int, first: int) -> Iterator[TextBatch]:
        """Yield batches that depend on the seed and the step alone."""
        lengths, done = np.array([len(row.ids) for row in self._train]), epoch * self.steps_per_epoch + first
        batches = batches_of_passes(lengths, self._batch_size, seed=self._seed, first=done)
        for rows in islice(batches, self.steps_per_epoch - first):
            yield padded([self._train[row] for row in rows], self._device)

    def loss(self, batch: TextBatch, progress: float) -> Tensor:
        """Return the mean cross-entropy of the tokens that are learnt, in nats."""
        return functional.cross_entropy(*learnt_logits(self.model, batch, self._precision))

    def evaluate(self) -> EpochScore:
        """Return the negated cross-entropy of the hold-out, printed as perplexity."""
        cross_entropy = float(teacher_forced(self.model, self._holdout).losses.mean())
        return EpochScore(-cross_entropy, "perplexity", math.exp(min(cross_entropy, 700.0)))


def train_language(
    name: str,
    corpus: Corpus,
    tokenizer: TextTokenizer,
    preset: Preset,
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
        model = new_gpt2(tokenizer.size, preset.dim, preset.layers, preset.heads, preset.positions, end=tokenizer.end)
    model.to(device_of(device))  # type: ignore[arg-type]
    return train_to_directory(
        model,
        corpus,
        tokenizer,
        preset.recipe,
        directory,
        seed=seed,
        steps_per_epoch=preset.steps // preset.recipe.epochs,
        kind=MODEL,
        arguments={"name": name, "plan": msgspec.to_builtins(preset), "vocabulary": tokenizer.size},
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
        kind: name of the model in the record, ``arguments`` are its further fields.
        finish: returns, after the training, the model to measure and to write, and further files beside it.
    """
    directory = Path(directory)
    files = RunFiles(directory, tensorboard)
    rows, holdout, data = corpus.encoded(tokenizer, positions_of(model))  # type: ignore[arg-type]
    objective = LanguageObjective(model, rows, holdout, recipe, seed=seed, steps_per_epoch=steps_per_epoch)
    trained = train(objective, recipe, seed=seed, state=files.state, log=files.log, observer=observer)
    finished, further = finish()
    measures = evaluate(finished, tokenizer, "holdout", corpus.holdout, max_tokens=completion_limit(rows))
    metrics = trained.metrics(finished.num_parameters(), measures)
    made = provenance(trainer=f"{trained.steps} steps, {recipe}", data=data, seed=seed)
    config = RunConfig(kind, arguments, made, precision=recipe.precision, processor=processor())
    save_backbone(finished.cpu(), tokenizer, directory, {**records(config, metrics), **files.finished(), **further})
    files.remove()
    return metrics


def records(config: RunConfig, metrics: RunMetrics) -> dict[str, bytes]:
    """Return the records of a new model by file name."""
    contents = {TRAINING: config, METRICS: metrics}
    return {name: msgspec.json.format(msgspec.json.encode(of), indent=2) + b"\n" for name, of in contents.items()}
