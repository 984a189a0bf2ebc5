"""Restoration of reduced encoders on plain text: each imitates the original, without labels.

One forward pass of the original teaches several students, so that a family of tiers costs little more than its largest
one. The losses work for any shape: outputs are compared as the head compares them; each kept layer imitates the state
before the next kept one, which the next layer was trained on; and embeddings also imitate the similarities within a
batch. ``RESULTS.md`` compares them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from edge.datatypes import Array
from edge.errors import Raw, UsageError
from export.data.evaluation import has_evaluated
from export.data.examples import Examples, limited, split_holdout
from export.data.tokens import Batch, Encoded, batches_of_passes, encode
from export.data.unlabelled import read_texts
from export.errors import DataError
from export.finetune.imported import ImportedTask
from export.finetune.objectives import hidden_loss, imitated_layers, outputs_by_row, outputs_with_states
from export.finetune.task import Reader, Task
from export.finetune.text_tasks import SentenceTask
from export.models.heads import Head, Outputs, SentenceEmbedder
from export.reduce.losses import divergence
from export.reduce.plan import ReducedModel
from export.reduce.states import layers_of
from export.reduce.target import LEARNING_RATE, PASSES
from export.training import recipe
from export.training.checkpoint import fingerprint
from export.training.device import DeviceName, device_of, model_device
from export.training.log import RunFiles
from export.training.objective import SILENT, EpochScore, Observer
from export.training.trainer import Trained, train

#: Of the order of the texts.
SEED = 0
#: Most texts of the hold-out on which students are measured.
MOST_HELD_OUT = 2000
_LEAST_TEXTS = 100
#: In other languages a tokenizer falls back to single characters, and to the token for what it does not know: English
#: has 4.5 bytes a token, and German with an English vocabulary 2.9.
_LEAST_BYTES, _MOST_UNKNOWN = 2.3, 0.01


class RestorationRecipe(recipe.Recipe, frozen=True, kw_only=True):
    """Settings of a restoration; ``RESULTS.md`` compares some.

    Attributes:
        epochs: parts of the training, of equal length, after each of which the students are measured.
        min_delta: minus infinity, so that all students keep their last epoch, whatever their scores: the learning rate
            ends at zero, and the best mean of a family is not the best of each.
        passes: over the texts; a part of one is allowed.
        batch_size: texts.
        max_length: tokens of a text; longer ones are cut.
        output, hidden, similarity: weights of the losses; 0 leaves one out.
    """

    epochs: int = 10
    passes: float = PASSES
    batch_size: int = 128
    max_length: int = 128
    peak_learning_rate: float = LEARNING_RATE
    warmup_share: float = 0.04
    schedule: recipe.Schedule = "cosine"
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    weight_decay: float = 0.01
    min_delta: float = -math.inf
    clip_norm: float | None = 1.0
    clips: recipe.Clips = "each"  # so that a student learns the same beside others
    output: float = 2.0
    hidden: float = 1.0
    similarity: float = 10.0


class Texts(NamedTuple):
    """Texts to restore on, those on which students are measured, and both as they are read."""

    train: Encoded
    held_out: Encoded
    items: Examples


class Student(NamedTuple):
    """A reduced model, and the layer of the original that each of its layers imitates, from 0."""

    model: Head
    imitated: tuple[int, ...]


def reads_pairs(task: Task) -> bool:
    """Return whether the model of a task reads pairs of texts; a UsageError refuses images, and questions on a text."""
    if isinstance(task, SentenceTask):
        return len(task.texts) == 2
    if isinstance(task, ImportedTask) and task.description.image is None:
        return task.description.pair
    expected, fix = "a model of texts or pairs of texts", "Leave --distil out, and fine-tune with --teacher."
    raise UsageError("--distil", given=Raw(f"a model for {task.name}"), expected=expected, fix=fix)


def read_restoration_texts(
    paths: Sequence[Path],
    reader: Reader,
    max_length: int,
    evaluated: Collection[str] = (),
    *,
    pair: bool = False,
    leave_out: bool = False,
) -> Texts:
    """Read the texts of files, without repetitions; a tenth is held out by the hash, as in every other command.

    Args:
        paths: as :func:`export.data.unlabelled.read_texts` reads them.
        evaluated: sentences that the model will be evaluated on.
        pair: each line has two texts.
        leave_out: texts with such a sentence, in place of refusing them.

    Raises:
        DataError: a file cannot be read; there are too few texts; sentences of an evaluation are among them; or they
            are in a language that the tokenizer does not know.
    """
    assert isinstance(reader, Tokenizer)
    names = ", ".join(map(str, paths))
    found = tuple(dict.fromkeys(text for path in paths for text in read_texts(path, pair)))
    known = has_evaluated(found, evaluated)
    if known.any() and not leave_out:
        example = " ".join(found[int(known.argmax())])[:80]
        given = Raw(f"{known.sum()} of {len(found)} with a sentence of an evaluation set, such as {example!r}")
        fix = "Give --leave-out-evaluated to train without them."
        raise DataError(f"texts {names}", given=given, expected="none of them", fix=fix)
    found = tuple(text for text, out in zip(found, known, strict=True) if not out)
    if len(found) < _LEAST_TEXTS:
        given, expected = Raw(f"{len(found)} different texts"), f"{_LEAST_TEXTS} at least"
        fix = "Give more: some hundred thousand sentences restore a small encoder, and they need no labels."
        raise DataError(f"texts {names}", given=given, expected=expected, fix=fix)
    items = Examples(found, np.zeros(len(found), np.int64))
    train, holdout = split_holdout(items)
    holdout = limited(holdout, MOST_HELD_OUT)
    _check_language(names, reader, holdout.texts)
    return Texts(encode(reader, train, max_length), encode(reader, holdout, max_length), items)


def _check_language(names: str, reader: Tokenizer, texts: Sequence[tuple[str, ...]]) -> None:
    encodings = reader.encode_batch([" ".join(text) for text in texts], add_special_tokens=False)
    tokens = [token for encoding in encodings for token in encoding.tokens]
    unknown = getattr(reader.model, "unk_token", None)
    share = sum(token == unknown for token in tokens) / max(1, len(tokens))
    size = sum(len(part.encode()) for text in texts for part in text) / max(1, len(tokens))
    if share > _MOST_UNKNOWN or size < _LEAST_BYTES:
        given = Raw(f"{size:.1f} bytes a token, and {share:.1%} unknown tokens")
        expected = f"{_LEAST_BYTES} bytes or more, and {_MOST_UNKNOWN:.0%} at most"
        fix = "Give texts in the language that the model reads."
        raise DataError(f"texts {names} in the model's tokens", given=given, expected=expected, fix=fix)


class Restored(NamedTuple):
    """The training of some students, and how near each is to the original; see :meth:`RestorationObjective.closeness`.

    The scores of the training are means over the students, which have the weights of the last epoch.
    """

    trained: Trained
    closeness: dict[str, float]


def restore(
    original: Head,
    reduced: Mapping[str, ReducedModel[Head]],
    texts: Texts,
    recipe: RestorationRecipe,
    device: DeviceName = "cpu",
    files: RunFiles | None = None,
    observer: Observer = SILENT,
) -> Restored:
    """Train reduced models in place to imitate the original, all by one forward pass of it for each batch.

    Args:
        files: state and log of the training; the same call resumes from them, and the caller removes them.

    Raises:
        UsageError: there is no such device.
        TrainingError: a loss is not finite.
        CheckpointError: the state is malformed, of another training, or cannot be written.
    """
    place, home = device_of(device), model_device(original)
    students = {
        name: Student(each.model.to(place), imitated_layers(each.plan.kept, len(each.plan.layers)))
        for name, each in reduced.items()
    }
    objective = RestorationObjective(original.to(place), students, texts, recipe)
    state, log = (files.state, files.log) if files else (None, None)
    trained = train(objective, recipe, seed=SEED, state=state, log=log, observer=observer)
    closeness = objective.measured or objective.closeness()  # a resumed training may have ended before
    for model in (original, *objective.model):
        model.to(home)
    return Restored(trained, closeness)


class RestorationObjective:
    """An :class:`export.training.objective.Objective`: students imitate the original.

    Embeddings stay those of the original, and so does the bias of relative positions, which all layers share.

    Args:
        students: by name; they are trained in place.

    Attributes:
        measured: what the last :meth:`evaluate` measured; empty before.
    """

    def __init__(
        self, original: Head, students: Mapping[str, Student], texts: Texts, recipe: RestorationRecipe
    ) -> None:
        self._original, self._students, self._texts = original.eval(), dict(students), texts
        self._recipe, self._device = recipe, model_device(original)
        self.model = nn.ModuleList(student.model for student in students.values())
        for student in students.values():
            transformer = student.model.transformer
            transformer.embeddings.requires_grad_(False)
            for layer in layers_of(transformer):
                if layer.attention is not None and layer.attention.relative is not None:
                    layer.attention.relative.requires_grad_(False)
        self.rates: Mapping[nn.Parameter, float] = {}
        per_pass = math.ceil(len(texts.train.targets) / recipe.batch_size)
        self.steps_per_epoch = math.ceil(max(1, recipe.passes * per_pass) / recipe.epochs)
        self._imitated = sorted({layer for student in students.values() for layer in student.imitated})
        self._by_angle = isinstance(original, SentenceEmbedder)
        self._wanted = outputs_by_row(original, texts.held_out, precision=recipe.precision) if self._by_angle else []
        self.measured: dict[str, float] = {}
        self._size = 1.0
        if self._by_angle:  # so that the loss of embeddings that are not normalised is as large as that of others
            embeddings = original.answers([row.outputs for row in self._wanted])
            self._size = float(np.square(embeddings).sum(axis=1).mean())

    def fingerprint(self) -> str:
        """Return a hash of the weights, the original's, the texts and the plan."""
        models = [self._original, *self.model]
        imitated = [(name, student.imitated) for name, student in self._students.items()]
        return fingerprint(models, self._texts.train.contents, f"{imitated} {SEED}")

    def batches(self, epoch: int, first: int) -> Iterator[Array]:
        """Yield the rows of each batch."""
        lengths, done = self._texts.train.lengths, epoch * self.steps_per_epoch + first
        batches = batches_of_passes(lengths, self._recipe.batch_size, seed=SEED, first=done)
        return islice(batches, self.steps_per_epoch - first)

    def loss(self, batch: Array, progress: float) -> Iterator[Tensor]:
        """Yield the loss of each student, so that a family takes the memory of its largest one."""
        inputs = self._texts.train.batch(batch).to(self._device)
        with torch.no_grad():
            wanted, states = outputs_with_states(self._original, inputs, self._imitated, self._recipe.precision)
        by_layer = dict(zip(self._imitated, (state.float() for state in states), strict=True))
        for student in self._students.values():
            layers = [by_layer[layer] for layer in student.imitated]
            yield self._student_loss(student.model, inputs, wanted, layers)

    def _student_loss(self, model: Head, inputs: Batch, wanted: Outputs, layers: list[Tensor]) -> Tensor:
        weights = self._recipe
        outputs, states = outputs_with_states(model, inputs, range(len(layers)), weights.precision)
        loss = weights.output * model.imitation(outputs, wanted, 1.0) / self._size
        if weights.hidden:
            loss = loss + weights.hidden * hidden_loss([state.float() for state in states], layers, inputs.mask)
        if weights.similarity and self._by_angle:
            assert isinstance(outputs, Tensor)
            assert isinstance(wanted, Tensor)
            loss = loss + weights.similarity * _similarity_loss(outputs, wanted)
        return loss

    def evaluate(self) -> EpochScore:
        """Measure the students, and return the mean of their scores; see :meth:`closeness`."""
        self.measured = self.closeness()
        value = sum(self.measured.values()) / len(self.measured)
        return EpochScore(value, "cosine") if self._by_angle else EpochScore(value, "divergence", printed=-value)

    def closeness(self) -> dict[str, float]:
        """Return how near each student is to the original on the texts that are held out; more is nearer.

        It is the mean cosine of embeddings; of other outputs, the negated divergence.
        """
        return {name: self._closeness(student.model) for name, student in self._students.items()}

    def _closeness(self, model: Head) -> float:
        if not self._by_angle:
            return -divergence(self._original, model, self._texts.held_out, self._recipe.precision)
        rows = outputs_by_row(model, self._texts.held_out, precision=self._recipe.precision)
        given, wanted = (model.answers([row.outputs for row in each]) for each in (rows, self._wanted))
        return float(model.agreements(given, wanted).mean())


def _similarity_loss(outputs: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean squared error of the cosines of all pairs in a batch."""
    ours, theirs = (functional.normalize(each) for each in (outputs, wanted))
    return functional.mse_loss(ours @ ours.T, theirs @ theirs.T)
