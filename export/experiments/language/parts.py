"""The parts of the experiment: a method on a task with a seed, trained and scored once, in a file of its own.

The first seed of a method tries all learning rates, and further ones take the one that was best on the hold-out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from torch import nn

from edge.errors import Raw
from edge.files import write_whole
from export.errors import TrainingError
from export.generate.answers import parse_answer
from export.generate.base import Base
from export.generate.decoding import GREEDY, complete
from export.generate.finetuned import trainable
from export.generate.metrics import answer_measures, token_measures
from export.generate.objective import LanguageObjective, teacher_forced
from export.papers.backward.compare.methods import HEAD, METHODS, Method
from export.papers.backward.compare.records import Part, Settings
from export.papers.backward.compare.tasks import Task
from export.papers.backward.head import BackwardHead
from export.papers.backward.training import RECIPE, HeadObjective, HiddenStates, load_head, save_head, states_of
from export.papers.experiment import Before, read_part
from export.training.objective import Objective, Observer
from export.training.provenance import provenance
from export.training.runs import RunMetrics
from export.training.trainer import Trained, train

#: Examples in a batch of a whole model. They have about as many tokens with a loss as the other methods' batches.
_SEQUENCES = 32
_ANSWERED_TOGETHER = 100
_PARTS, _STATES, _HEADS = "parts", "states", "heads"


class Best(NamedTuple):
    """The training of a part with the best learning rate."""

    module: nn.Module
    rate: float
    trained: Trained


class Experiment:
    """All parts of a comparison, in its directory ``out``."""

    def __init__(self, base: Base, tasks: Sequence[Task], settings: Settings, out: Path) -> None:
        self.base, self.tasks, self._settings, self._out = base, tasks, settings, out

    def parts(self, seeds: int, before: Before) -> Iterator[Part]:
        """Yield all parts, computing those that have no file yet: all tasks with a seed before the next seed."""
        rates: dict[tuple[str, str], float] = {}
        for seed in range(seeds):
            for task, method in product(self.tasks, METHODS):
                if seed and not method.is_random:
                    continue
                path = self._path(task, method, seed, ".json")
                if path.exists():
                    part = read_part(path, Part)
                else:
                    chosen = rates.get((task.name, method.name))
                    tried = self._settings.rates if chosen is None else (chosen,)
                    part = self._computed(task, method, seed, tried, before(f"{task.name}, {method.name}, seed {seed}"))
                    write_whole(path, msgspec.json.format(msgspec.json.encode(part), indent=1))
                for rate in self._settings.rates:
                    self._state_path(task, method, seed, rate).unlink(missing_ok=True)
                if part.rate is not None:
                    rates.setdefault((task.name, method.name), part.rate)
                yield part

    def states(self, task: Task) -> dict[str, HiddenStates]:
        """Return the hidden states of a task by ``train``, ``holdout`` and ``test``."""
        rows = {"train": task.train, "holdout": task.holdout, "test": task.test_rows}
        return states_of(self.base, self._out / _STATES, rows)

    def head(self, task: Task, seed: int) -> BackwardHead:
        """Return the head that was trained on a task."""
        return load_head(self._head_path(task, seed), self.base)

    def objective(self, task: Task, method: Method, module: nn.Module, seed: int) -> Objective:
        """Return the training of a method's module on a task; an epoch has each of its examples once."""
        if method.of_model:
            return LanguageObjective(
                module,
                task.train,
                task.holdout,
                seed=seed,
                batch_size=_SEQUENCES,
                steps_per_epoch=-(-len(task.train) // _SEQUENCES),
            )
        states = self.states(task)
        return HeadObjective(
            module, self.base.read_out, states["train"], states["holdout"], seed=seed, batch_size=RECIPE.batch_size
        )

    def _computed(self, task: Task, method: Method, seed: int, rates: Sequence[float], observer: Observer) -> Part:
        part = Part(task=task.name, method=method.name, seed=seed, answers=(), measures=())
        if method.make is None:
            return self._scored(task, method, None, part)
        losses: dict[str, float | None] = {}
        best: Best | None = None
        for rate in rates:
            module = method.make(self.base, seed)
            objective, state = self.objective(task, method, module, seed), self._state_path(task, method, seed, rate)
            recipe = replace(RECIPE, epochs=self._settings.epochs, peak_learning_rate=rate)
            try:
                trained = train(objective, recipe, seed=seed, state=state, observer=observer)
            except TrainingError:
                losses[f"{rate:g}"] = None
                continue
            losses[f"{rate:g}"] = -max(trained.scores)
            if best is None or max(trained.scores) > max(best.trained.scores):
                best = Best(module, rate, trained)
        if best is None:
            fix = "Give other data."
            given = Raw(f"no finite loss at any rate of {', '.join(losses)}")
            raise TrainingError(f"{method.name} on {task.name}", given=given, expected="one that converges", fix=fix)
        part = replace(
            part,
            parameters=trainable(best.module),
            seconds=best.trained.seconds,
            rate=best.rate,
            holdout=losses,
        )
        part = self._scored(task, method, best.module, part)
        if method is HEAD:
            self._save_head(task, best, part)
        return part

    def _scored(self, task: Task, method: Method, module: nn.Module | None, part: Part) -> Part:
        """Return the part with what it scores on the test split."""
        asked = task.test[: self._settings.items]
        decoding = replace(method.decoding, seed=part.seed)
        with method.applied(self.base, module) as model:
            prompts = [example.prompt for example in asked]
            texts = complete(
                model, self.base.tokenizer, prompts, task.max_tokens, decoding, batch_size=_ANSWERED_TOGETHER
            )
            answers = tuple(map(parse_answer, texts))
            measures = answer_measures("test", answers, [example.answer for example in asked])
            if method.decoding != GREEDY:
                return replace(part, answers=answers, measures=measures)
            forced = teacher_forced(model, task.test_rows)
        return replace(
            part,
            losses=tuple(np.bincount(forced.rows, forced.losses).tolist()),
            tokens=tuple(np.bincount(forced.rows).tolist()),
            answers=answers,
            measures=(*token_measures("test", forced), *measures),
        )

    def _save_head(self, task: Task, best: Best, part: Part) -> None:
        assert isinstance(best.module, BackwardHead)
        trained = best.trained
        metrics = RunMetrics(
            part.parameters,
            len(trained.scores),
            trained.best_epoch,
            trained.seconds,
            part.measures,
            trained.losses,
            trained.scores,
        )
        trainer = (
            f"{trained.steps} steps, {replace(RECIPE, epochs=self._settings.epochs, peak_learning_rate=best.rate)}"
        )
        data = f"{len(task.train)} examples of {task.name}, {self._settings.data[task.name]}"
        record = provenance(trainer=trainer, data=data, seed=part.seed)
        save_head(self._head_path(task, part.seed), best.module, self.base, record, metrics)

    def _path(self, task: Task, method: Method, seed: int, end: str) -> Path:
        name = re.sub(r"[^a-zA-Z0-9.]+", "-", method.name)
        return self._out / _PARTS / f"{task.name}-{name}-seed{seed}{end}"

    def _state_path(self, task: Task, method: Method, seed: int, rate: float) -> Path:
        return self._path(task, method, seed, f"-{rate:g}.state")

    def _head_path(self, task: Task, seed: int) -> Path:
        return self._out / _HEADS / f"{task.name}-seed{seed}"
