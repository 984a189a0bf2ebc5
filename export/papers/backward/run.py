"""The experiment of paper 004: backward attention on a frozen language model, compared with simpler methods.

A part is a method on a task with a seed. The first seed tries all learning rates; further ones take the one that was
best on the hold-out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace
from torch import nn

from edge.errors import Raw
from export.errors import TrainingError
from export.generate.decoding import complete
from export.generate.evaluate import completion_limit, teacher_forced
from export.generate.finetune import trainable
from export.generate.formats import parse_answer, same_answer
from export.generate.model import Base, BaseIdentity, LastStates
from export.generate.train import LanguageObjective
from export.papers.backward.methods import CONTROLS, DIMS, FROZEN, HEAD, METHODS, MathematicsTask, Method
from export.papers.backward.training import RECIPE, HeadObjective, HiddenStates, hidden_states
from export.papers.experiment import Experiment, Part, read_records, unfinished
from export.report.table import Table
from export.training.intervals import RESAMPLES, Sample
from export.training.objective import Objective
from export.training.provenance import Processor
from export.training.trainer import train
from export.training.watch import Watch

#: Examples in a batch of a whole model. They have about as many tokens with a loss as the other methods' batches.
_SEQUENCES = 32
_ANSWERED_TOGETHER = 100
#: A method and a task.
Key: TypeAlias = tuple[str, str]


class ComparisonSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of all parts.

    Attributes:
        data: SHA-256 of the files of each task.
        limit: examples to train on.
        epochs: passes over them.
        items: test examples that are answered; the cross-entropy is over all.
        rates: peak learning rates, the same for every method.
    """

    base: BaseIdentity
    data: dict[str, str]
    limit: int
    epochs: int
    items: int
    rates: tuple[float, ...] = (2e-4, 1e-3, 5e-3, 2.5e-2, 1e-1)
    seeds: int
    processor: Processor


class MethodRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A method on a task with a seed.

    Attributes:
        parameters: that were trained.
        rate: the learning rate that was used; None without training.
        holdout: cross-entropy by learning rate, of those that were tried; None where the training diverged.
        losses: sum of the cross-entropies of each test example's tokens, to a millionth, and ``tokens`` their number.
        right: whether the answers to the first test examples are.
    """

    parameters: int = 0
    rate: float | None = None
    holdout: dict[str, float | None] = {}
    losses: tuple[float, ...]
    tokens: tuple[int, ...]
    right: tuple[bool, ...]


class HeadComparison(Experiment[MethodRecord]):
    """The comparison in a directory; reports alone need neither the language model nor the tasks."""

    title, record, extensible = "Backward attention on a frozen language model", MethodRecord, ("seeds", "processor")

    def __init__(
        self,
        settings: ComparisonSettings,
        out: Path,
        base: Base | None = None,
        tasks: Mapping[str, MathematicsTask] = {},
    ) -> None:
        self.settings: ComparisonSettings = settings
        self._out, self._base, self._tasks = out, base, tasks
        self._states: dict[str, list[HiddenStates]] = {}

    def parts(self) -> list[Part]:
        """All tasks with a seed come before the next seed."""
        return [
            Part(_name(task, method.name, seed), (task, method.name, seed))
            for seed in range(self.settings.seeds)
            for task in self.settings.data
            for method in METHODS.values()
            if method.make or not seed
        ]

    def compute(self, part: Part, watch: Watch) -> MethodRecord:
        """Train a method with the best learning rate, and score it."""
        name, method, seed = part.arguments
        task, method = self._tasks[name], METHODS[method]
        if method.make is None:
            return self._scored(task, method, None)
        first = read_records(self._out, MethodRecord).get(_name(name, method.name, 0)) if seed else None
        rates = (first.rate,) if first and first.rate else self.settings.rates
        losses: dict[str, float | None] = {}
        best: tuple[float, float, nn.Module] | None = None
        for rate in rates:
            module = method.make(self.base, seed)
            recipe = replace(RECIPE, epochs=self.settings.epochs, peak_learning_rate=rate)
            state = unfinished(self._out, part) / f"{rate:g}.state"
            objective = self.objective(name, method, module, seed)
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

    def objective(self, name: str, method: Method, module: nn.Module, seed: int) -> Objective:
        """Return the training of a method's module on a task; an epoch has each of its examples once."""
        task = self._tasks[name]
        if method.of_model:
            steps = -(-len(task.train) // _SEQUENCES)
            return LanguageObjective(
                module, task.train, task.holdout, seed=seed, batch_size=_SEQUENCES, steps_per_epoch=steps
            )
        if name not in self._states:
            last = LastStates(self.base.model)
            self._states[name] = [hidden_states(last, rows) for rows in (task.train, task.holdout)]
        return HeadObjective(module, self.base.read_out, *self._states[name], seed=seed)

    def _scored(self, task: MathematicsTask, method: Method, module: nn.Module | None) -> MethodRecord:
        asked, base = task.test[: self.settings.items], self.base
        with method.applied(base, module) as model:
            prompts, limit = [example.prompt for example in asked], completion_limit(task.train)
            texts = complete(model, base.tokenizer, prompts, limit, batch_size=_ANSWERED_TOGETHER)
            forced = teacher_forced(model, task.test_rows)
        return MethodRecord(
            losses=tuple(np.bincount(forced.rows, forced.losses).round(6).tolist()),
            tokens=tuple(np.bincount(forced.rows).tolist()),
            right=tuple(same_answer(parse_answer(text), of.answer) for text, of in zip(texts, asked, strict=True)),
        )

    def text(self, records: Mapping[str, MethodRecord]) -> str:
        """Return how the results came about."""
        settings, rates = self.settings, ", ".join(f"{rate:g}" for rate in self.settings.rates)
        return (
            f"Written by `fewheads language compare`, on {settings.base.described}. Each method had the "
            f"same {settings.limit:,} training examples of a task at most, {settings.epochs} times; the head has "
            f"d = {DIMS}, the adapter and LoRA about as many parameters. The learning rate is one of {rates}, by the "
            "cross-entropy on a hold-out of the training splits, chosen with the first seed. Each "
            f"was then scored once on the test split, with {settings.seeds} seeds: the cross-entropy on all examples, "
            f"answers on the first {settings.items}. Intervals are of 95 %, each by itself: they add the errors of the "
            f"examples ({RESAMPLES:,} resamples) and of the seeds (Student's); differences are of the same examples. "
            "The literal form's loss takes a distribution for logits, so that its cross-entropy is at least "
            "ln((e + V - 1) / e).\n\n"
            f"Computed on {settings.processor.name} ({settings.processor.described})."
        )

    def tables(self, records: Mapping[str, MethodRecord]) -> list[Table]:
        """Return both metrics of all methods by task, the learning rates, and the answers that the head changes."""
        groups: dict[Key, list[MethodRecord]] = defaultdict(list)
        for part in self.parts():
            if part.name in records:
                method, task = part.arguments[1::-1]
                groups[method, task].append(records[part.name])
        # Metric by metric: the resamples of one number of items are kept at a time.
        losses = {
            key: Sample.of_items(np.array([record.losses for record in group]), np.array(group[0].tokens, float))
            for key, group in groups.items()
        }
        matches = {
            key: Sample.of_items(100.0 * np.array([record.right for record in group]), np.ones(len(group[0].right)))
            for key, group in groups.items()
        }
        first = {key: group[0] for key, group in groups.items()}
        tasks, methods = list(self.settings.data), list(dict.fromkeys(method for method, _ in groups))
        rates = [(name, *(getattr(first.get((name, task)), "rate", None) for task in tasks)) for name in methods[1:]]
        pairs = {
            task: list(zip(first[FROZEN.name, task].right, first[HEAD.name, task].right, strict=True))
            for task in tasks
            if (HEAD.name, task) in first
        }
        flips = [(task, len(of), of.count((False, True)), of.count((True, False))) for task, of in pairs.items()]
        return [
            self._by_task("Cross-entropy, nats per token", first, losses),
            self._by_task("Right answers, %", first, matches),
            Table("Learning rates", ("method", *tasks), rates),
            Table("Answers that the first head changes", ("task", "of", "wrong → right", "right → wrong"), flips),
        ]

    def _by_task(self, title: str, first: Mapping[Key, MethodRecord], samples: Mapping[Key, Sample]) -> Table:
        """Return the means of methods, and what the head has more or less than each control."""
        tasks = list(self.settings.data)
        parameters = {method: record.parameters for (method, _), record in first.items()}
        rows: list[tuple[object, ...]] = [
            (name, number, *(samples[name, task].mean() if (name, task) in samples else None for task in tasks))
            for name, number in parameters.items()
        ]
        for name in (name for name in parameters if name in CONTROLS):
            pairs = [(samples.get((HEAD.name, task)), samples.get((name, task))) for task in tasks]
            rows.append((f"the head minus: {name}", None, *(a.minus(b) if a and b else None for a, b in pairs)))
        return Table(title, ("method", "trained parameters", *tasks), rows)


def _name(task: str, method: str, seed: int) -> str:
    return f"{task}-{re.sub(r'[^a-zA-Z0-9.]+', '-', method)}-seed{seed}"
