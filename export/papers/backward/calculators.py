"""Pretrained language models that are fine-tuned as calculators, as in paper 000: all weights, or adapters.

A part is a way to fine-tune with a seed; all parts have the same expressions, and are scored on the same test splits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from export.generate.decoding import complete
from export.generate.evaluate import completion_limit
from export.generate.finetune import Tuning, trainable, tuned
from export.generate.formats import Example, parse_answer, same_answer
from export.generate.model import Base, BaseIdentity, positions_of
from export.generate.train import Corpus
from export.papers.experiment import Experiment, Part, unfinished
from export.report.table import Table
from export.training.intervals import RESAMPLES, Mean, Sample
from export.training.provenance import Processor
from export.training.recipe import Precision
from export.training.watch import Watch

_TOGETHER = 100


class CalculatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of all parts.

    Attributes:
        data: SHA-256 of the examples that are trained on, and then of each test split.
        rank, epochs, precision: as in :class:`export.generate.finetune.Tuning`.
        rate, full_rate: the learning rate of adapters, and that of all weights.
    """

    base: BaseIdentity
    data: dict[str, str]
    rank: int
    epochs: int
    rate: float
    full_rate: float
    precision: Precision
    seeds: int
    processor: Processor

    @property
    def tunings(self) -> dict[str, Tuning]:
        """Both ways to fine-tune, by name."""
        return {
            name: Tuning(rank=rank, epochs=self.epochs, rate=rate, precision=self.precision)
            for name, rank, rate in (
                ("all weights", None, self.full_rate),
                (f"LoRA of rank {self.rank}", self.rank, self.rate),
            )
        }


class CalculatorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A fine-tuned model: parameters that trained, the epoch that is kept, and by split which answers are right."""

    parameters: int
    best_epoch: int
    right: dict[str, tuple[bool, ...]]


class FinetunedCalculators(Experiment[CalculatorRecord]):
    """The experiment in a directory; reports alone need neither the language model nor examples.

    Args:
        examples: those that are trained on, those of the hold-out, and the test splits by name.
    """

    title, record = "Pretrained language models, fine-tuned as calculators", CalculatorRecord
    extensible = ("seeds", "processor")

    def __init__(
        self,
        settings: CalculatorSettings,
        out: Path,
        base: Base | None = None,
        examples: tuple[Corpus, Mapping[str, Sequence[Example]]] | None = None,
    ) -> None:
        self.settings: CalculatorSettings = settings
        self._out = out
        if base and examples:
            self._base, self._examples = base, examples

    def parts(self) -> list[Part]:
        """Both ways with a seed come before the next seed."""
        return [
            Part(f"{name.replace(' ', '-')}-seed{seed}", (name, seed))
            for seed in range(self.settings.seeds)
            for name in self.settings.tunings
        ]

    def compute(self, part: Part, watch: Watch) -> CalculatorRecord:
        """Fine-tune a copy of the model, and let it answer the test splits by greedy decoding."""
        name, seed = part.arguments
        base, (corpus, tests) = self._base, self._examples
        rows, holdout, _ = corpus.encoded(base.tokenizer, positions_of(base.model))
        state, tuning = unfinished(self._out, part) / "state", self.settings.tunings[name]
        model, trained = tuned(base.model, tuning, rows, holdout, seed=seed, state=state, observer=watch)
        right, most = {}, completion_limit(rows)
        for done, (split, examples) in enumerate(tests.items()):
            watch.on_part(f"answers {split}", done, len(tests))
            prompts = [example.prompt for example in examples]
            texts = complete(model, base.tokenizer, prompts, most, batch_size=_TOGETHER)
            pairs = zip(texts, examples, strict=True)
            right[split] = tuple(same_answer(parse_answer(text), example.answer) for text, example in pairs)
        return CalculatorRecord(parameters=trainable(model), best_epoch=trained.best_epoch, right=right)

    def text(self, records: Mapping[str, CalculatorRecord]) -> str:
        """Return how the results came about."""
        settings = self.settings
        return (
            f"Written by `fewheads language calculator`, on {settings.base.described}, with products in "
            f"{settings.precision.upper()} in training. {settings.epochs} epochs, of which the hold-out keeps one, at "
            f"{settings.full_rate:g} for all weights, and at {settings.rate:g} for adapters on all linear layers but "
            "the last. Answers are of greedy decoding. Intervals are of 95 %: they add the errors of the expressions "
            f"({RESAMPLES:,} resamples) and of the seeds (Student's).\n\n"
            f"Computed on {settings.processor.name} ({settings.processor.described})."
        )

    def tables(self, records: Mapping[str, CalculatorRecord]) -> list[Table]:
        """Return the shares of right answers by way and split."""
        groups: dict[str, list[CalculatorRecord]] = {}
        for part in self.parts():
            if part.name in records:
                groups.setdefault(part.arguments[0], []).append(records[part.name])
        rows = []
        for name, group in groups.items():
            epochs = ", ".join(str(record.best_epoch) for record in group)
            shares = [_percent([record.right[split] for record in group]) for split in group[0].right]
            rows.append((name, group[0].parameters, len(group), epochs, *shares))
        heads = ("trained", "trained parameters", "seeds", "epochs kept", *list(self.settings.data)[1:])
        return [Table("Right answers, %", heads, rows)]


def _percent(right: Sequence[Sequence[bool]]) -> Mean:
    return Sample.of_items(100.0 * np.array(right), np.ones(len(right[0]))).mean()
