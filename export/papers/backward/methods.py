"""The head of backward attention and the methods that it is compared with, and the tasks of the comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn

from edge.errors import Raw
from export.errors import DataError
from export.generate.evaluate import encode_fitting
from export.generate.finetune import trainable, unfrozen, with_lora
from export.generate.formats import Example, Source, read_source
from export.generate.model import Base
from export.generate.tokenizer import EncodedExample, TextTokenizer
from export.generate.train import read_corpus
from export.papers.backward.training import LowRankAdapter, Temperature, new_bias, new_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: d of the heads, the paper's.
DIMS = 30
Make = Callable[[Base, int], nn.Module]


class Method(NamedTuple):
    """A way to answer questions with a language model.

    Attributes:
        make: returns what trains, from the language model and a seed; None trains nothing.
        of_model: whether that is a copy of the whole model, not a module on its logits.
    """

    name: str
    make: Make | None = None
    of_model: bool = False

    @contextmanager
    def applied(self, base: Base, module: nn.Module | None) -> Iterator[PreTrainedModel]:
        """Yield the language model with what was trained."""
        if module is not None and self.of_model:
            yield cast("PreTrainedModel", module)
        else:
            with base.revised(module) as model:
                yield model


def _seeded(make: Callable[[Base], nn.Module]) -> Make:
    def made(base: Base, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make(base).to(base.device)

    return made


def _head(**shape: Any) -> Make:
    return lambda base, seed: new_head(base, seed, **shape)


def _adapter(base: Base) -> nn.Module:
    parameters = new_head(base, 0, dims=DIMS).parameter_count
    rank = LowRankAdapter.rank_for(parameters, base.vocabulary, base.width)
    return LowRankAdapter(base.vocabulary, base.width, rank)


def _lora(base: Base, seed: int) -> nn.Module:
    parameters = new_head(base, 0, dims=DIMS).parameter_count
    per_rank = trainable(with_lora(base.model, 1, seed))
    return with_lora(base.model, max(1, round(parameters / per_rank)), seed)


FROZEN = Method("frozen model")
HEAD = Method("backward attention", _head(dims=DIMS))
ADAPTER = Method("low-rank adapter", _seeded(_adapter))
METHODS = {
    method.name: method
    for method in (
        FROZEN,
        HEAD,
        ADAPTER,
        Method("temperature", _seeded(lambda base: Temperature())),
        Method("vocabulary bias", lambda base, seed: new_bias(base)),
        Method("backward attention, 3 heads", _head(dims=DIMS, heads=3)),
        Method("backward attention, 2 layers", _head(dims=DIMS // 2, layers=2)),
        Method("backward attention, literal", _head(dims=DIMS, form="literal")),
        Method("LoRA", _lora, of_model=True),
        Method("full fine-tuning", lambda base, seed: unfrozen(base.model), of_model=True),
    )
}
#: What the head has to beat: the frozen model, and all that trains but other forms of the head.
CONTROLS = [
    name for name, method in METHODS.items() if method is FROZEN or (method.make and not name.startswith(HEAD.name))
]


class MathematicsTask(NamedTuple):
    """A module of the mathematics dataset; examples that do not fit into the model's positions are left out.

    Attributes:
        train, holdout: as tokens, from the training splits.
        test: the examples of the test split, and ``test_rows`` the same as tokens.
    """

    train: list[EncodedExample]
    holdout: list[EncodedExample]
    test: tuple[Example, ...]
    test_rows: list[EncodedExample]


def read_task(path: Path, tokenizer: TextTokenizer, positions: int, limit: int) -> MathematicsTask:
    """Return the task of DIRECTORY/MODULE, whose files are DIRECTORY/SPLIT/MODULE.txt.

    Questions of the test split are neither trained on nor chosen with.

    Args:
        limit: examples to train on, at most; they are drawn, always the same, from all training splits alike.

    Raises:
        DataError: a file is missing or malformed, or no example fits.
    """
    trains = sorted(path.parent.glob(f"train*/{path.name}.txt"))
    if not trains:
        fix = "Generate them with export/papers/backward/generate_mathematics.py, or correct the path."
        expected = f"{path.parent}/train*/{path.name}.txt"
        raise DataError(f"--data {path}", given=Raw("no training split"), expected=expected, fix=fix)
    corpus = read_corpus([Source("mathematics", str(file)) for file in trains], seed=0)
    test_file = path.parent / "interpolate" / f"{path.name}.txt"
    (examples,) = read_source(Source("mathematics", str(test_file))).values()
    asked = {example.prompt for example in examples}
    train, holdout = ([row for row in part if row.prompt not in asked] for part in (corpus.train, corpus.holdout))
    order = np.random.default_rng(0).permutation(len(train))[:limit]
    test = tuple(example for example in examples if len(tokenizer.encode(example).ids) <= positions)
    return MathematicsTask(
        encode_fitting(tokenizer, [train[index] for index in order], positions),
        encode_fitting(tokenizer, holdout, positions),
        test,
        encode_fitting(tokenizer, test, positions),
    )
