"""What a head changes: tokens whose probability moves most, ranks of the right tokens, and answers that flip."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from edge.datatypes import Array
from export.generate.answers import same_answer
from export.papers.backward.compare.methods import FROZEN, HEAD
from export.papers.backward.compare.parts import Experiment
from export.papers.backward.compare.records import Part
from export.papers.backward.compare.tasks import Task

#: Tokens whose probability changes most, and answers that flip, of which so many are kept.
_TOKENS, _FLIPS = 16, 12
_ROWS = 512
#: Ranks are counted in classes up to these.
RANKS = (1, 2, 3, 5, 10, 100)


class Moved(msgspec.Struct, frozen=True):
    """A token, and the change of its mean probability over all positions."""

    token: str
    change: float


class Flip(msgspec.Struct, frozen=True):
    """A question that one of the two answers rightly."""

    question: str
    right: str
    frozen: str | None
    head: str | None


class Flips(msgspec.Struct, frozen=True):
    """How many of some predictions become right, and how many wrong."""

    of: int
    wrong_to_right: int
    right_to_wrong: int


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """The changes by one head on a task's test split.

    Attributes:
        moved: tokens whose probability changes most, those that rise first.
        rises, falls: positions at which the right token has a better, or a worse, rank.
        frozen_ranks, head_ranks: share of the right tokens with a rank of at most each of :data:`RANKS`.
        tokens: the most likely tokens, given the right ones before them.
        answers: of whole greedy texts; some that flip are in ``gained`` and ``lost``.
    """

    task: str
    moved: tuple[Moved, ...]
    rises: int
    falls: int
    frozen_ranks: tuple[float, ...]
    head_ranks: tuple[float, ...]
    tokens: Flips
    answers: Flips
    gained: tuple[Flip, ...]
    lost: tuple[Flip, ...]


def changes_of(experiment: Experiment, task: Task, parts: Sequence[Part]) -> Changes:
    """Return what the first head of a task changes; its part and the frozen model's are among the parts."""
    base = experiment.base
    change, ranks, right = _over_positions(experiment, task)
    most = np.argsort(-np.abs(change))[:_TOKENS]
    chosen = most[np.argsort(-change[most])]
    decoded = [base.tokenizer.tokenizer.decode([int(one)], skip_special_tokens=False) for one in chosen]
    moved = tuple(Moved(token, float(change[one])) for token, one in zip(decoded, chosen, strict=True))
    frozen, head = (_answers(parts, task, name) for name in (FROZEN.name, HEAD.name))
    pairs = list(zip(task.test, frozen, head, strict=False))
    flips = [
        (same_answer(after, one.answer), Flip(one.prompt, one.answer, before, after))
        for one, before, after in pairs
        if same_answer(before, one.answer) != same_answer(after, one.answer)
    ]
    gained, lost = ([flip for better, flip in flips if better is wanted] for wanted in (True, False))
    shares = [tuple(float((of_model <= most).mean()) for most in RANKS) for of_model in ranks]
    return Changes(
        task=task.name,
        moved=moved,
        rises=int((ranks[1] < ranks[0]).sum()),
        falls=int((ranks[1] > ranks[0]).sum()),
        frozen_ranks=shares[0],
        head_ranks=shares[1],
        tokens=Flips(len(right[0]), int((right[1] & ~right[0]).sum()), int((right[0] & ~right[1]).sum())),
        answers=Flips(len(pairs), len(gained), len(lost)),
        gained=tuple(gained[:_FLIPS]),
        lost=tuple(lost[:_FLIPS]),
    )


@torch.no_grad()
def _over_positions(experiment: Experiment, task: Task) -> tuple[Array, Array, Array]:
    """Return the change of each token's mean probability [V], and for both models [2, P] ranks and hits."""
    base, states = experiment.base, experiment.states(task)["test"]
    head = experiment.head(task, 0)
    change = np.zeros(base.vocabulary)
    ranks, hits = [], []
    for start in range(0, len(states.targets), _ROWS):
        rows = slice(start, start + _ROWS)
        hidden = torch.from_numpy(states.hidden[rows].astype(np.float32)).to(base.device)
        targets = torch.from_numpy(states.targets[rows].astype(np.int64)).to(base.device)[:, None]
        frozen = base.read_out.logits(hidden)
        both = torch.stack([frozen, head(frozen)])
        probabilities = both.double().softmax(dim=2).sum(dim=1)
        change += (probabilities[1] - probabilities[0]).cpu().numpy() / len(states.targets)
        of_right = both.gather(2, targets.expand(2, -1, 1))
        ranks.append(1 + (both > of_right).sum(dim=2).cpu().numpy())
        hits.append((both.argmax(dim=2) == targets[:, 0]).cpu().numpy())
    return change, np.concatenate(ranks, axis=1), np.concatenate(hits, axis=1)


def _answers(parts: Sequence[Part], task: Task, method: str) -> tuple[str | None, ...]:
    return next(part.answers for part in parts if (part.task, part.method, part.seed) == (task.name, method, 0))
