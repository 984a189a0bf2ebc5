"""The fine-tuned language models of paper 000 answer worse than in their training; this experiment finds the cause.

A part is an adapter, trained on a base in FP32 or NF4 with a seed and scored under all conditions: on its own base or
merged into that in FP32, begin tokens once or twice, teacher-forced and written freely.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from export.generate.decoding import complete_tokens
from export.generate.evaluate import fitting, teacher_forced
from export.generate.finetune import BasePrecision, Tuning, merged, moved, trainable, tuned
from export.generate.formats import Example, parse_answer, same_answer
from export.generate.model import Base, BaseIdentity, positions_of
from export.generate.tokenizer import TextTokenizer
from export.generate.train import Corpus
from export.papers.experiment import Experiment, Part, unfinished
from export.report.table import Table
from export.training.intervals import RESAMPLES, Difference, Mean, Sample, average, points, with_interval
from export.training.provenance import Processor
from export.training.recipe import Precision
from export.training.watch import Watch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASES: tuple[BasePrecision, ...] = ("fp32", "nf4")
#: How the begin tokens stand before a text: once as in training, twice, or twice while all further tokens keep their
#: positions of the training.
Begin = Literal["once", "twice", "twice, places kept"]
BEGINS: tuple[Begin, ...] = ("once", "twice, places kept", "twice")
#: How predictions are scored: tokens, or whole completions, that are right given the right tokens before them; whole
#: completions that greedy decoding writes; and right answers in what it writes.
Metric = Literal["tokens", "forced", "written", "answers"]
METRICS: tuple[Metric, ...] = ("tokens", "forced", "written", "answers")
#: The examples that adapters were trained on, as a split.
TRAINED = "training"
_TOGETHER = 100


class MismatchSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings of all parts.

    Attributes:
        data: SHA-256 of the examples that are trained on, and then of each test split.
        begin: the tokens that stand before each text once in training.
        rank, epochs, rate, precision: as in :class:`export.generate.finetune.Tuning`.
    """

    base: BaseIdentity
    data: dict[str, str]
    begin: tuple[int, ...]
    rank: int
    epochs: int
    rate: float
    precision: Precision = "fp32"
    seeds: int
    processor: Processor


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """What one model predicts on a split under one condition: a number for each example.

    Attributes:
        merged: whether the adapter is merged into the FP32 base, in place of working on the base of its training.
        tokens: of the right completion.
        hits: of these, how many are the most likely ones given the right ones before them.
        written: whether greedy decoding writes exactly these tokens.
        answered: whether the answer in the written text is right.
    """

    split: str
    merged: bool
    begin: Begin
    tokens: tuple[int, ...]
    hits: tuple[int, ...]
    written: tuple[bool, ...]
    answered: tuple[bool, ...]

    def values(self, metric: Metric) -> Sequence[float]:
        """Return the numerators of a metric."""
        if metric == "forced":
            return [hits == tokens for hits, tokens in zip(self.hits, self.tokens, strict=True)]
        return {"tokens": self.hits, "written": self.written, "answers": self.answered}[metric]


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter; ``best_epoch`` is the one that is kept."""

    parameters: int
    best_epoch: int
    scores: tuple[Scores, ...]


class Condition(NamedTuple):
    """How a fine-tuned model is used and scored; ``merged`` and ``begin`` are those of :class:`Scores`."""

    merged: bool
    begin: Begin
    metric: Metric


_AS_TRAINED, _FORCED = Condition(False, "once", "answers"), Condition(False, "once", "forced")
#: Changes from one condition to another, by name.
SWITCHES = {
    "merged into the FP32 base": (_AS_TRAINED, Condition(True, "once", "answers")),
    "begin token twice, places kept": (_AS_TRAINED, Condition(False, "twice, places kept", "answers")),
    "begin token twice": (_AS_TRAINED, Condition(False, "twice", "answers")),
    "merged, and begin token twice": (_AS_TRAINED, Condition(True, "twice", "answers")),
    "written freely, not teacher-forced": (_FORCED, Condition(False, "once", "written")),
    "whole completions, not tokens": (Condition(False, "once", "tokens"), _FORCED),
}


class Mismatch(Experiment[AdapterRecord]):
    """The experiment in a directory; reports alone need neither the language model nor examples.

    Args:
        examples: those that are trained on, those of the hold-out, and the test splits by name.
    """

    title, record = "Accuracy in training and in use of a fine-tuned language model", AdapterRecord
    extensible = ("seeds", "processor")

    def __init__(
        self,
        settings: MismatchSettings,
        out: Path,
        base: Base | None = None,
        examples: tuple[Corpus, Mapping[str, Sequence[Example]]] | None = None,
    ) -> None:
        self.settings: MismatchSettings = settings
        self._out, self._splits = out, (TRAINED, *list(settings.data)[1:])
        if base and examples:
            corpus, tests = examples
            self._base = base
            self._once, self._twice = (base.tokenizer.beginning_with(settings.begin * times) for times in (1, 2))
            self._train, self._holdout, *further = (
                # What fits into the model's positions with the begin tokens twice.
                [example for example, _ in fitting(self._twice, of, positions_of(base.model))]
                for of in (corpus.train, corpus.holdout, *tests.values())
            )
            self._examples = dict(zip(self._splits, (self._train, *further), strict=True))

    def parts(self) -> list[Part]:
        """Both bases with a seed come before the next seed."""
        return [Part(f"{base}-seed{seed}", (base, seed)) for seed, base in product(range(self.settings.seeds), BASES)]

    def compute(self, part: Part, watch: Watch) -> AdapterRecord:
        """Train an adapter, and score it under all conditions."""
        base, seed = part.arguments
        settings = self.settings
        tuning = Tuning(
            rank=settings.rank, base=base, epochs=settings.epochs, rate=settings.rate, precision=settings.precision
        )
        rows = ([self._once.encode(example) for example in of] for of in (self._train, self._holdout))
        state = unfinished(self._out, part) / "state"
        model, trained = tuned(self._base.model, tuning, *rows, seed=seed, state=state, observer=watch)
        models: dict[bool, Any] = {False: model, True: merged(moved(model, self._base.model))}
        conditions = list(product(models, BEGINS, self._splits))
        scores = []
        for done, (is_merged, begin, split) in enumerate(conditions):
            watch.on_part(f"scores {split}", done, len(conditions))
            scores.append(self._scores(models[is_merged], is_merged, begin, split))
        return AdapterRecord(parameters=trainable(model), best_epoch=trained.best_epoch, scores=tuple(scores))

    def _scores(self, model: PreTrainedModel, is_merged: bool, begin: Begin, split: str) -> Scores:
        tokenizer, examples = self._once if begin == "once" else self._twice, self._examples[split]
        rows = [tokenizer.encode(example) for example in examples]
        prompts, rights = ([row.ids[row.learnt == learnt].tolist() for row in rows] for learnt in (False, True))
        most = max(map(len, rights)) * 5 // 4
        with moved_back(model, len(self.settings.begin)) if begin == "twice, places kept" else nullcontext():
            forced = teacher_forced(model, rows, _TOGETHER)
            written = complete_tokens(model, prompts, most, batch_size=_TOGETHER)
        tokens, hits = (np.bincount(forced.rows, weights) for weights in (None, forced.predicted == forced.targets))
        answers = [parse_answer(tokenizer.decode(ids)) for ids in written]
        return Scores(
            split=split,
            merged=is_merged,
            begin=begin,
            tokens=tuple(tokens.tolist()),
            hits=tuple(map(int, hits)),
            written=tuple(ids[: len(right)] == right for ids, right in zip(written, rights, strict=True)),
            answered=tuple(same_answer(of, right.answer) for of, right in zip(answers, examples, strict=True)),
        )

    def _scores_of(self, records: Mapping[str, AdapterRecord]) -> dict[tuple[str, str, bool, Begin], list[Scores]]:
        """Return the scores of all seeds by base, split, merged and begin, split by split."""
        scores: dict[tuple[str, str, bool, Begin], list[Scores]] = {}
        for split in self._splits:  # the resamples of one size are kept at a time
            for part in sorted(self.parts(), key=lambda part: str(part.arguments[0])):
                for of in records[part.name].scores if part.name in records else ():
                    if of.split == split:
                        scores.setdefault((part.arguments[0], split, of.merged, of.begin), []).append(of)
        return scores

    def text(self, records: Mapping[str, AdapterRecord]) -> str:
        """Return how the results came about."""
        settings, seeds = self.settings, len({part.arguments[1] for part in self.parts() if part.name in records})
        products = "" if settings.precision == "fp32" else ", with products in BF16 in training"
        return (
            f"{_agreement(records)}\n\n"
            f"Written by `fewheads language mismatch`, on {settings.base.described}, by LoRA of rank {settings.rank} "
            f"on all linear layers but the last, {settings.epochs} epochs at {settings.rate:g}, {seeds} "
            f"seeds{products}. The base is in FP32 or rounded to NF4 "
            "while an adapter trains, and the adapter is used on that base or merged into the FP32 base. Texts begin "
            f"with the tokens {list(settings.begin)}, once in training. The second time, these move all other tokens "
            "by so many places; with places kept, the others stay where they were in training, and the first tokens "
            "share their place. Teacher-forced scores are the most likely tokens given the right ones before them; "
            "written scores are of greedy decoding from the question alone. Intervals are of 95 %: they add the "
            f"errors of the examples ({RESAMPLES:,} resamples) and of the seeds (Student's); differences are of the "
            "same adapters and, within a split, the same examples.\n\n"
            f"Computed on {settings.processor.name} ({settings.processor.described})."
        )

    def tables(self, records: Mapping[str, AdapterRecord]) -> list[Table]:
        """Return the effect of each switch, and all conditions."""
        samples = {
            (base, split, Condition(is_merged, begin, metric)): _sample(scores, metric)
            for (base, split, is_merged, begin), scores in self._scores_of(records).items()
            for metric in METRICS
        }
        effects = [
            (base.upper(), name, *(points(_change(samples, base, split, before, after)) for split in self._splits))
            for base in BASES
            if (base, TRAINED, _FORCED) in samples
            for name, (before, after) in SWITCHES.items()
        ]
        every: dict[tuple[str, ...], list[str]] = {}
        for (base, split, condition), sample in samples.items():
            used = "FP32, merged" if condition.merged else f"{base.upper()}, its own"
            every.setdefault((base.upper(), used, condition.begin, split), []).append(_percent(sample.mean()))
        heads = (
            *("base in training", "base in use", "begin tokens", "data"),
            *("tokens right, teacher-forced", "completions right, teacher-forced"),
            *("completions right, written", "answers right, written"),
        )
        return [
            Table(
                "One switch at a time, change in points",
                ("base in training", "switch", *self._splits),
                effects,
                texts=2,
            ),
            Table("All conditions, accuracy in %", heads, [(*key, *row) for key, row in every.items()], texts=4),
        ]


@contextmanager
def moved_back(model: PreTrainedModel, shift: int) -> Iterator[None]:
    """Give each token of a text the position of one so many before it during the block; the first ones share the first.

    So tokens that are put before a text leave the positions of its own tokens as they were.
    """

    def move(_: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids: Tensor = inputs[0] if inputs else options["input_ids"]
        given = options.get("position_ids")
        if given is None:
            given = torch.arange(ids.shape[1], device=ids.device)[None]
            # Without a mask, transformers takes positions that do not rise for several texts.
            options = {**options, "attention_mask": torch.ones_like(ids)}
        return inputs, {**options, "position_ids": (given - shift).clamp(min=0)}

    # Generation needs the positions in the cache of the whole model, so only the layers below see others; a model with
    # adapters is a wrapper of a plain one.
    untyped: Any = model
    plain = untyped.get_base_model() if hasattr(untyped, "get_base_model") else untyped
    layers: nn.Module = plain.base_model
    hook = layers.register_forward_pre_hook(move, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def begin_of(tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Return the tokens that a text begins with; the end where a tokenizer has none, as with GPT-2."""
    return tuple(tokenizer.begin) or (tokenizer.end,)


def _agreement(records: Mapping[str, AdapterRecord]) -> str:
    scores = [of for record in records.values() for of in record.scores]
    agree = [
        forced == written for of in scores for forced, written in zip(of.values("forced"), of.written, strict=True)
    ]
    return f"Teacher forcing and free writing agree on {sum(agree):,} of {len(agree):,} whole completions."


def _sample(scores: Sequence[Scores], metric: Metric) -> Sample:
    weights = scores[0].tokens if metric == "tokens" else [1] * len(scores[0].tokens)
    return Sample.of_items(np.array([of.values(metric) for of in scores], float), np.array(weights, float))


def _change(
    samples: Mapping[tuple[str, str, Condition], Sample], base: str, split: str, before: Condition, after: Condition
) -> Difference:
    return average([samples[base, split, after].paired(samples[base, split, before])])


def _percent(value: Mean) -> str:
    return with_interval(value.value, value.interval, lambda share: f"{100 * share:.1f}")
