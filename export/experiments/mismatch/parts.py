"""The parts of the experiment: an adapter, trained on a base of one precision with a seed and scored, in a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from edge.files import write_whole
from export.generate.answers import parse_answer, same_answer
from export.generate.backbone import positions_of
from export.generate.base import Base
from export.generate.decoding import complete_tokens
from export.generate.evaluate import fitting
from export.generate.finetune import BasePrecision, Tuning, adapted
from export.generate.finetuned import merged, moved, trainable
from export.generate.formats import Example
from export.generate.objective import LanguageObjective, teacher_forced
from export.generate.tokenizer import TextTokenizer
from export.generate.train import Corpus
from export.papers.backward.mismatch.places import moved_back
from export.papers.backward.mismatch.records import BEGINS, Begin, Part, Scores, Settings
from export.papers.experiment import Before, read_part
from export.training.trainer import train
from export.training.watch import Watch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASES: tuple[BasePrecision, ...] = ("fp32", "nf4")
#: The examples that adapters were trained on, as a split.
TRAINED = "training"
_TOGETHER = 100
_PARTS = "parts"


class Experiment:
    """All parts, in a directory ``out``.

    Args:
        tests: splits by name, beside the examples that are trained on.
    """

    def __init__(
        self, base: Base, corpus: Corpus, tests: Mapping[str, Sequence[Example]], settings: Settings, out: Path
    ) -> None:
        self.base, self._settings, self._out = base, settings, out
        self._once, self._twice = (base.tokenizer.beginning_with(settings.begin * times) for times in (1, 2))
        self._train, self._holdout = self._fitting(corpus.train), self._fitting(corpus.holdout)
        self.splits = {TRAINED: self._train, **{name: self._fitting(some) for name, some in tests.items()}}

    def parts(self, seeds: int, before: Before) -> Iterator[Part]:
        """Yield all parts, computing those that have no file yet."""
        for seed, base in product(range(seeds), BASES):
            path = self._out / _PARTS / f"{base}-seed{seed}.json"
            if path.exists():
                yield read_part(path, Part)
                continue
            state = path.with_suffix(".state")
            part = self._computed(base, seed, state, before(f"base in {base}, seed {seed}"))
            write_whole(path, msgspec.json.encode(part))
            state.unlink(missing_ok=True)
            yield part

    def _computed(self, base: BasePrecision, seed: int, state: Path, watch: Watch) -> Part:
        settings = self._settings
        tuning = Tuning(rank=settings.rank, base=base, epochs=settings.epochs, rate=settings.rate)
        model = adapted(self.base.model, tuning, seed)
        size, encode = tuning.recipe.batch_size, self._once.encode
        objective = LanguageObjective(
            model,
            [encode(one) for one in self._train],
            [encode(one) for one in self._holdout],
            seed=seed,
            batch_size=size,
            steps_per_epoch=-(-len(self._train) // size),
        )
        trained = train(objective, tuning.recipe, seed=seed, state=state, observer=watch)
        models: dict[bool, Any] = {False: model, True: merged(moved(model, self.base.model))}
        conditions = list(product(models, BEGINS, self.splits))
        scores = []
        for done, (is_merged, begin, split) in enumerate(conditions):
            watch.on_part(f"scores {split}", done, len(conditions))
            scores.append(self._scores(models[is_merged], is_merged, begin, split))
        return Part(
            base=base,
            seed=seed,
            parameters=trainable(model),
            seconds=trained.seconds,
            best_epoch=trained.best_epoch,
            scores=tuple(scores),
        )

    def _scores(self, model: PreTrainedModel, is_merged: bool, begin: Begin, split: str) -> Scores:
        tokenizer, examples = self._once if begin == "once" else self._twice, self.splits[split]
        rows = [tokenizer.encode(one) for one in examples]
        prompts = [row.ids[~row.learnt].tolist() for row in rows]
        rights = [row.ids[row.learnt].tolist() for row in rows]
        most = max(map(len, rights)) * 5 // 4
        with moved_back(model, len(self._settings.begin)) if begin == "twice, places kept" else nullcontext():
            forced = teacher_forced(model, rows, _TOGETHER)
            found = complete_tokens(model, prompts, most, batch_size=_TOGETHER)
        tokens, hits = (np.bincount(forced.rows, one) for one in (None, forced.predicted == forced.targets))
        answers = [parse_answer(tokenizer.decode(ids)) for ids in found]
        return Scores(
            split=split,
            merged=is_merged,
            begin=begin,
            tokens=tuple(tokens.tolist()),
            hits=tuple(map(int, hits)),
            written=tuple(ids[: len(right)] == right for ids, right in zip(found, rights, strict=True)),
            answered=tuple(same_answer(one, right.answer) for one, right in zip(answers, examples, strict=True)),
        )

    def _fitting(self, examples: Sequence[Example]) -> tuple[Example, ...]:
        """Return the examples that have no more tokens than the model has positions, with the begin tokens twice."""
        positions = positions_of(self.base.model)
        return tuple(one for one, _ in fitting(self._twice, examples, positions))


def begin_of(tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Return the tokens that a text begins with; the end where a tokenizer has none, as with GPT-2."""
    return tuple(tokenizer.begin) or (tokenizer.end,)
