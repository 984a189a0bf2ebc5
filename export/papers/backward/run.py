"""The experiment of paper 004: backward attention on a frozen language model, compared with simpler methods.

A part is a method on a task with a seed and a number of examples. The first seed tries all learning rates; further ones
take the one that was best on the hold-out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from torch import nn

from edge.errors import Raw
from export.errors import TrainingError
from export.generate.decoding import GREEDY, complete
from export.generate.evaluate import completion_limit, teacher_forced, token_measures
from export.generate.finetune import trainable
from export.generate.formats import parse_answer, same_answer
from export.generate.model import Base, BaseIdentity, LastStates
from export.generate.tokenizer import EncodedExample
from export.generate.train import HOLDOUT, LanguageObjective
from export.papers.backward.methods import (
    DIMS,
    GROUPS,
    HEAD,
    METHODS,
    MOST_SHOWN,
    MathematicsTask,
    Method,
    Shown,
    shown,
)
from export.papers.backward.scores import MethodRecord, Scored, tables_of
from export.papers.backward.training import RECIPE, HeadObjective, HiddenStates, hidden_states
from export.papers.experiment import Experiment, Part, read_records, unfinished
from export.report.table import Table
from export.training.intervals import RESAMPLES
from export.training.objective import Objective
from export.training.provenance import Processor
from export.training.trainer import train
from export.training.watch import Watch

#: Examples in a batch of a whole model. They have about as many tokens with a loss as the other methods' batches.
_SEQUENCES = 32
_ANSWERED_TOGETHER = 100
#: Of a training on few examples, about; the best pass is kept.
_FEWEST_STEPS = 100
_LITERAL = (
    " The literal form's loss takes a distribution for logits, so that its cross-entropy is at least "
    "ln((e + V - 1) / e)."
)


class ComparisonSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of all parts.

    Attributes:
        data: SHA-256 of the files of each task.
        limit: examples to train on.
        fewer: smaller numbers of examples, each of which is trained on, too. A hold-out is as large, or whole.
        epochs: passes over the examples; those of fewer are passed at least until :data:`_FEWEST_STEPS` steps are done.
        methods: names in :data:`METHODS`.
        items: test examples that are answered; the cross-entropy is over all.
        rates: peak learning rates, the same for every method.
    """

    base: BaseIdentity
    data: dict[str, str]
    limit: int
    fewer: tuple[int, ...] = ()
    epochs: int
    items: int
    methods: tuple[str, ...] = GROUPS["trained"]
    rates: tuple[float, ...] = (2e-4, 1e-3, 5e-3, 2.5e-2, 1e-1)
    seeds: int
    processor: Processor


class _Rows(NamedTuple):
    train: list[EncodedExample]
    holdout: list[EncodedExample]


class HeadComparison(Experiment[MethodRecord]):
    """The comparison in a directory; reports alone need neither the language model nor the tasks."""

    title, record = "Backward attention on a frozen language model", MethodRecord
    extensible = ("seeds", "methods", "fewer", "processor")

    def __init__(
        self,
        settings: ComparisonSettings,
        out: Path,
        base: Base | None = None,
        tasks: Mapping[str, MathematicsTask] = {},
    ) -> None:
        self.settings: ComparisonSettings = settings
        self._out, self._base, self._tasks = out, base, tasks
        self._states: dict[tuple[str, int, int], list[HiddenStates]] = {}

    def parts(self) -> list[Part]:
        """All tasks with a seed come before the next seed."""
        limit = self.settings.limit
        return [
            Part(_name(task, name, seed, examples if examples < limit else None), (task, name, seed, examples))
            for seed in range(self.settings.seeds)
            for task in self.settings.data
            for examples in sorted({*self.settings.fewer, limit})
            for name, method in METHODS.items()
            if name in self.settings.methods
            if method.varies or not seed
            if method.learns or examples == limit
            if not method.shows or examples <= MOST_SHOWN
        ]

    def compute(self, part: Part, watch: Watch) -> MethodRecord:
        """Train a method with the best learning rate, and score it."""
        name, method, seed, examples = part.arguments
        task, method = self._tasks[name], METHODS[method]
        if method.shows:
            before = shown(self.base, task, self._rows(name, seed, examples).train)
            return replace(self._scored(task, method, before=before, seed=seed), shown=before.examples)
        if method.make is None:
            return self._scored(task, method, seed=seed)
        first = read_records(self._out, MethodRecord).get(part.name.replace(f"-seed{seed}", "-seed0")) if seed else None
        rates = (first.rate,) if first and first.rate else self.settings.rates
        losses: dict[str, float | None] = {}
        best: tuple[float, float, nn.Module] | None = None
        for rate in rates:
            module = method.make(self.base, seed)
            objective, passes = self.objective(name, method, module, seed, examples)
            recipe = replace(RECIPE, epochs=passes, peak_learning_rate=rate)
            # A few examples have many passes, each of which would write a state, and few steps to lose.
            state = unfinished(self._out, part) / f"{rate:g}.state" if examples == self.settings.limit else None
            try:
                score = max(train(objective, recipe, seed=seed, state=state, observer=watch).scores)
            except TrainingError:
                losses[f"{rate:g}"] = None
                continue
            losses[f"{rate:g}"] = -score
            if best is None or score > best[0]:
                best = score, rate, module
        if best is None:
            given, fix = Raw(f"no finite loss at any rate of {', '.join(losses)}"), "Give other data."
            raise TrainingError(f"{method.name} on {name}", given=given, expected="one that converges", fix=fix)
        _, rate, module = best
        record = self._scored(task, method, module)
        return replace(record, parameters=trainable(module), rate=rate, holdout=losses)

    @property
    def base(self) -> Base:
        """The language model."""
        assert self._base is not None, "a report alone has no model"
        return self._base

    def objective(
        self, name: str, method: Method, module: nn.Module, seed: int, examples: int
    ) -> tuple[Objective, int]:
        """Return the training of a method's module on a task, and its epochs, each of which has every example once."""
        rows, passes = self._rows(name, seed, examples), self.settings.epochs
        steps = -(-len(rows.train) // _SEQUENCES)
        if examples < self.settings.limit:
            passes = max(passes, -(-_FEWEST_STEPS // steps))
        if method.of_model:
            return LanguageObjective(module, *rows, replace(RECIPE, batch_size=_SEQUENCES), seed=seed), passes
        drawn = (name, seed, examples) if examples < self.settings.limit else (name, 0, examples)
        if drawn not in self._states:
            last = LastStates(self.base.model)
            self._states[drawn] = [hidden_states(last, some) for some in rows]
        return HeadObjective(module, self.base.read_out, *self._states[drawn], seed=seed), passes

    def _rows(self, name: str, seed: int, examples: int) -> _Rows:
        """Return what is trained on and the hold-out: of fewer examples, those that the seed draws from all."""
        task = self._tasks[name]
        if examples == self.settings.limit:
            return _Rows(task.train, task.holdout)
        generator = np.random.default_rng(seed)
        return _Rows(
            *([of[row] for row in generator.permutation(len(of))[:examples]] for of in (task.train, task.holdout))
        )

    def _scored(
        self,
        task: MathematicsTask,
        method: Method,
        module: nn.Module | None = None,
        before: Shown | None = None,
        seed: int = 0,
    ) -> MethodRecord:
        asked, base = task.test[: self.settings.items], self.base
        tokenizer = base.tokenizer.beginning_with(before.begin) if before else base.tokenizer
        texts_of_row = 1 + before.examples if before else 1  # so many times as long, of which fewer are read together
        with method.applied(base, module) as model:
            prompts, limit = [example.prompt for example in asked], completion_limit(task.train)
            decoding = replace(method.decoding, seed=seed)
            together = -(-_ANSWERED_TOGETHER // texts_of_row)
            texts = complete(model, tokenizer, prompts, limit, decoding, batch_size=together)
            answers = zip(map(parse_answer, texts), asked, strict=True)
            record = MethodRecord(right=tuple(same_answer(answer, of.answer) for answer, of in answers))
            if method.decoding != GREEDY:
                return record
            rows = [tokenizer.encode(example) for example in task.test] if before else task.test_rows
            forced = teacher_forced(model, rows, -(-_SEQUENCES // texts_of_row))
        return replace(
            record,
            losses=tuple(np.bincount(forced.rows, forced.losses).round(6).tolist()),
            tokens=tuple(np.bincount(forced.rows).tolist()),
            measures=tuple(one for one in token_measures("test", forced) if one.metric.startswith("token_")),
        )

    def text(self, records: Mapping[str, MethodRecord]) -> str:
        """Return how the results came about."""
        settings, rates = self.settings, ", ".join(f"{rate:g}" for rate in self.settings.rates)
        counts = sorted({record.shown for record in records.values() if record.shown})
        few = (
            f"Fewer examples are drawn anew for each seed, with as many, {HOLDOUT} at most, to choose rate and pass, "
            f"and are passed until about {_FEWEST_STEPS} steps are done. Prompts have as many of up to {MOST_SHOWN} as "
            "fit"
            f"{f', here {counts[0]} to {counts[-1]}' if counts else ''}. "
            if settings.fewer
            else ""
        )
        return (
            f"Written by `fewheads language compare`, on {settings.base.described}. Each method had the "
            f"same {settings.limit:,} training examples of a task at most, {settings.epochs} times; the head has "
            f"d = {DIMS}, the adapter and LoRA about as many parameters. The learning rate is one of {rates}, by the "
            "cross-entropy on a hold-out of the training splits, chosen with the first seed. Each "
            f"was then scored once on the test split, with {settings.seeds} seeds: the cross-entropy on all examples, "
            f"answers on the first {settings.items}. {few}Intervals are of 95 %, each by itself: they add the errors "
            f"of the examples ({RESAMPLES:,} resamples) and of the seeds (Student's); differences are of the same "
            f"examples.{_LITERAL if f'{HEAD.name}, literal' in settings.methods else ''}\n\n"
            f"Computed on {settings.processor.name} ({settings.processor.described})."
        )

    def tables(self, records: Mapping[str, MethodRecord]) -> list[Table]:
        """See :func:`export.papers.backward.scores.tables_of`."""
        groups: dict[Scored, list[MethodRecord]] = defaultdict(list)
        for part in self.parts():
            if part.name in records:
                task, method, _, examples = part.arguments
                groups[Scored(method, task, examples)].append(records[part.name])
        return tables_of(groups, list(self.settings.data), self.settings.limit)


def _name(task: str, method: str, seed: int, examples: int | None) -> str:
    words = re.sub(r"[^a-zA-Z0-9.]+", "-", method)
    return f"{task}-{words}-seed{seed}" + (f"-{examples}-examples" if examples else "")
