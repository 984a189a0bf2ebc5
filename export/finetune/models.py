"""Models with a head, read from a Hugging Face directory or from a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch
from torch import nn

from edge.bundles.steps import ImagePreprocess
from edge.errors import Raw, UsageError
from export.models.heads import (
    SCORE,
    Activation,
    Embedding,
    Head,
    Pooling,
    SentenceEmbedder,
    SequenceClassifier,
    SpanClassifier,
    TokenClassifier,
)
from export.models.huggingface import load_pretrained
from export.models.transformer import Transformer, TransformerConfig
from export.training.checkpoint import load
from export.training.runs import WEIGHTS, RunConfig, RunMetrics

#: The standard deviation of a new head's weights, as in BERT, and of a new ViT's positions.
_DEVIATION = 0.02

#: Start of a training: a Hugging Face directory, a run, or the shape of a new model.
Source: TypeAlias = "str | Path | TransformerConfig"


class Architecture(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Description from which a model with a head is rebuilt; the ``arguments`` of a run's ``config.json``.

    Attributes:
        task: a name in :data:`export.finetune.NAMES` or :data:`export.finetune.IMPORTED`, or of own data.
        labels: of the classes; one, ``score``, is a regression; none is a span.
        pooling: of the head of a sequence.
        max_length: most tokens of an input.
        pooler: activation of the layer between pooling and classifier; None without that layer.
        per_token: whether each token has one of the labels.
        embedding: of a model of embeddings, which has no labels; None for others.
        pair: whether an imported model reads two texts together.
        image: how an imported model reads images; None for others.
        no_answer: whether a span may be none, as in SQuAD 2.0.
        int8: names of the products that an earlier version trained for INT8; they are read in FP32, as all others are.
    """

    task: str
    transformer: TransformerConfig
    labels: tuple[str, ...] = ()
    pooling: Pooling = "mean"
    max_length: int = 128
    pooler: Activation | None = None
    per_token: bool = False
    embedding: Embedding | None = None
    pair: bool = False
    image: ImagePreprocess | None = None
    no_answer: bool = False
    int8: tuple[str, ...] = ()

    def create(self, transformer: Transformer) -> Head:
        """Return a transformer with a new head, with random weights by the generator of torch."""
        head: Head
        if self.embedding is not None:
            head = SentenceEmbedder(transformer, self.pooling, self.embedding)
        elif not self.labels:
            head = SpanClassifier(transformer, no_answer=self.no_answer)
        elif self.per_token:
            head = TokenClassifier(transformer, len(self.labels))
        else:
            regression = self.labels == (SCORE,)
            head = SequenceClassifier(transformer, len(self.labels), self.pooling, regression, self.pooler)
        classifier = head.layers.get("classifier")
        if classifier is not None:
            nn.init.normal_(classifier.weight, std=_DEVIATION)
            nn.init.zeros_(classifier.bias)
        for name in self.int8:
            head.get_submodule(name).register_buffer("largest", torch.ones(()))
        return head


#: Name of a model with a head in runs.
MODEL = "transformer-with-head"


class OpenedModel(msgspec.Struct, frozen=True):
    """A transformer in FP32, and from a run also its architecture, head, metrics and configuration."""

    transformer: Transformer
    architecture: Architecture | None = None
    head: Head | None = None
    metrics: RunMetrics | None = None
    config: RunConfig | None = None

    @property
    def measured_in_int8(self) -> bool:
        """Whether an earlier version trained the run for INT8: its measures and predictions are not those in FP32."""
        return self.config is not None and bool(self.config.arguments.get("int8"))


def open_model(directory: str | Path, others: Mapping[str, Callable[..., Head]] | None = None) -> OpenedModel:
    """Read a model from a Hugging Face directory or from a run of ``fewheads finetune``.

    Args:
        others: further models of runs by their names; each takes the fields of :class:`Architecture`.
    """
    if not (Path(directory) / WEIGHTS).exists():
        return OpenedModel(load_pretrained(directory).transformer)
    head, config, metrics = load(directory, {MODEL: head_of, **(others or {})})
    architecture = msgspec.convert(config.arguments, Architecture)
    for name in architecture.int8:
        del head.get_submodule(name).largest
    return OpenedModel(head.transformer, msgspec.structs.replace(architecture, int8=()), head, metrics, config)


def space_of(found: OpenedModel) -> str | None:
    """Return the space of a run's embeddings: the recorded one, or of an imported run of earlier versions its own.

    None for a model without embeddings, and for other runs of earlier versions.
    """
    if found.config is None or found.metrics is None or not isinstance(found.head, SentenceEmbedder):
        return None
    imported = found.config.speedup is None and found.metrics.epochs == 0
    return found.config.space or (found.head.fingerprint() if imported else None)


def open_or_new(source: Source, seed: int) -> OpenedModel:
    """Return the model of a directory, or a new one of a shape with weights by the seed."""
    if not isinstance(source, TransformerConfig):
        return open_model(source)
    torch.manual_seed(seed)
    transformer = Transformer(source)
    # torch's default for embeddings, 1, would dominate the patches.
    position = transformer.embeddings.get_submodule("position")
    assert isinstance(position, nn.Embedding)
    nn.init.normal_(position.weight, std=_DEVIATION)
    return OpenedModel(transformer)


def open_tuned(directory: str | Path, task: str) -> Head:
    """Read a model that was fine-tuned on a task."""
    found = open_model(directory)
    if found.head is None or found.architecture is None or found.architecture.task != task:
        given = found.architecture.task if found.architecture else Raw("a model without a task")
        fix = f"Give a run of 'fewheads finetune' on {task}."
        raise UsageError(f"task of {directory}", given=given, expected=task, fix=fix)
    return found.head


def with_head(found: OpenedModel, architecture: Architecture, seed: int) -> Head:
    """Return a model to train, changed in place: with its own head if that fits, else with a new one by the seed."""
    if found.head is not None and found.architecture == architecture:
        return found.head
    torch.manual_seed(seed)
    return architecture.create(found.transformer)


def head_of(**arguments: Any) -> Head:
    """Return a new model of the fields of :class:`Architecture`."""
    try:
        architecture = msgspec.convert(arguments, Architecture)
    except msgspec.ValidationError as error:
        raise TypeError(str(error)) from None  # export.training.checkpoint expects this of wrong arguments
    return architecture.create(Transformer(architecture.transformer))
