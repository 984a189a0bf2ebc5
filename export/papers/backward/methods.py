"""The head of backward attention and the methods that it is compared with, and the tasks of the comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn

from edge.errors import Raw
from export.errors import DataError
from export.generate.decoding import GREEDY, Decoding
from export.generate.evaluate import completion_limit, encode_fitting
from export.generate.finetune import trainable, unfrozen, with_lora
from export.generate.formats import Example, Source, read_source
from export.generate.model import Base, positions_of
from export.generate.tokenizer import EncodedExample, TextTokenizer
from export.generate.train import read_corpus
from export.papers.backward.training import LowRankAdapter, Temperature, new_bias, new_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: d of the heads, the paper's.
DIMS = 30
#: The most examples in a prompt, where they fit.
MOST_SHOWN = 32
Make = Callable[[Base, int], nn.Module]


class Method(NamedTuple):
    """A way to answer questions with a language model.

    Attributes:
        make: returns what trains, from the language model and a seed; None trains nothing.
        of_model: whether that is a copy of the whole model, not a module on its logits.
        decoding: how it answers.
        shows: whether the training examples stand before each question.
    """

    name: str
    make: Make | None = None
    of_model: bool = False
    decoding: Decoding = GREEDY
    shows: bool = False

    @property
    def learns(self) -> bool:
        """Whether the training examples matter."""
        return self.make is not None or self.shows

    @property
    def varies(self) -> bool:
        """Whether the seed matters."""
        return self.learns or self.decoding.temperature > 0

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
#: Ways to choose tokens that need no training.
RULES = (
    Method("frozen model, beam search of 4", decoding=Decoding(beams=4)),
    Method("frozen model, drawn at T = 0.7", decoding=Decoding(temperature=0.7)),
    Method("frozen model, drawn at T = 1", decoding=Decoding(temperature=1.0)),
    Method("frozen model, drawn at T = 1 from 40", decoding=Decoding(temperature=1.0, top_k=40)),
)
SHOWN = Method("frozen model, examples in the prompt", shows=True)
HEAD = Method("backward attention", _head(dims=DIMS))
ADAPTER = Method("low-rank adapter", _seeded(_adapter))
TEMPERATURE = Method("temperature", _seeded(lambda base: Temperature()))
BIAS = Method("vocabulary bias", lambda base, seed: new_bias(base))
LORA = Method("LoRA", _lora, of_model=True)
_COMPARED = (
    FROZEN,
    HEAD,
    ADAPTER,
    TEMPERATURE,
    BIAS,
    Method("backward attention, 3 heads", _head(dims=DIMS, heads=3)),
    Method("backward attention, 2 layers", _head(dims=DIMS // 2, layers=2)),
    Method("backward attention, literal", _head(dims=DIMS, form="literal")),
    LORA,
    Method("full fine-tuning", lambda base, seed: unfrozen(base.model), of_model=True),
)
_FORMS = (
    Method("backward attention, no residual", _head(dims=DIMS, form="alone")),
    Method("backward attention, divided by V", _head(dims=DIMS, divided=True)),
    *(Method(f"backward attention, top {k}", _head(dims=DIMS, top_k=k)) for k in (8, 40, 256)),
    *(Method(f"backward attention, latent {r}", _head(dims=DIMS, latent=r)) for r in (7, 14, 28)),
    *(Method(f"backward attention, dropout {rate}", _head(dims=DIMS, dropout=rate)) for rate in (0.1, 0.3)),
)
METHODS = {method.name: method for method in (*_COMPARED, *_FORMS, SHOWN, *RULES)}
#: Methods that are compared together, by the name of their group.
GROUPS = {
    group: tuple(method.name for method in methods)
    for group, methods in {
        "trained": _COMPARED,
        "rules": (FROZEN, *RULES, HEAD),
        "few": (FROZEN, SHOWN, HEAD, ADAPTER, TEMPERATURE, BIAS, LORA),
        "forms": (FROZEN, HEAD, *_FORMS),
    }.items()
}
#: What the head has to beat: all but other forms of it.
CONTROLS = [name for name in METHODS if not name.startswith(HEAD.name)]


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


class Shown(NamedTuple):
    """What stands before each question: the tokens of some examples, the tokenizer's own begin first."""

    begin: list[int]
    examples: int


def shown(base: Base, task: MathematicsTask, rows: Sequence[EncodedExample]) -> Shown:
    """Return the first examples that leave room for all questions of the test, :data:`MOST_SHOWN` at most."""
    longest = max(len(row.ids) for row in task.test_rows) + completion_limit(task.train)
    begin, examples = list(base.tokenizer.begin), 0
    between = base.tokenizer.tokenizer.encode("\n\n", add_special_tokens=False).ids
    for row in rows[:MOST_SHOWN]:
        more = [*row.ids[len(base.tokenizer.begin) : -1].tolist(), *between]
        if len(begin) + len(more) + longest > positions_of(base.model):
            break
        begin, examples = begin + more, examples + 1
    return Shown(begin, examples)
