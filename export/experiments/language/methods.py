"""The head of backward attention, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from export.generate.base import Base
from export.generate.decoding import GREEDY, Decoding
from export.generate.finetuned import trainable, unfrozen, with_lora
from export.papers.backward.training import LowRankAdapter, Temperature, VocabularyBias, new_head

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
        decoding: how its texts are written; draws take another seed in each run.
    """

    name: str
    make: Make | None = None
    of_model: bool = False
    decoding: Decoding = GREEDY

    @property
    def is_random(self) -> bool:
        """Whether runs with different seeds differ."""
        return self.make is not None or self.decoding.temperature > 0

    @contextmanager
    def applied(self, base: Base, module: nn.Module | None) -> Iterator[PreTrainedModel]:
        """Return the language model with what was trained, during the block."""
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


def _adapter(base: Base) -> nn.Module:
    parameters = new_head(base, 0, dims=DIMS).parameter_count
    rank = LowRankAdapter.rank_for(parameters, base.vocabulary, base.width)
    return LowRankAdapter(base.vocabulary, base.width, rank)


def _lora(base: Base, seed: int) -> nn.Module:
    parameters = new_head(base, 0, dims=DIMS).parameter_count
    per_rank = trainable(with_lora(base.model, 1, seed))
    return with_lora(base.model, max(1, round(parameters / per_rank)), seed)


def _head(**shape: Any) -> Make:
    return lambda base, seed: new_head(base, seed, **shape)


FROZEN = Method("frozen model")
HEAD = Method("backward attention", _head(dims=DIMS))
ADAPTER = Method("low-rank adapter", _seeded(_adapter))
METHODS = (
    FROZEN,
    Method("frozen, top-k 40", decoding=Decoding(temperature=1.0, top_k=40)),
    Method("frozen, T = 0.7", decoding=Decoding(temperature=0.7)),
    Method("frozen, T = 1", decoding=Decoding(temperature=1.0)),
    Method("frozen, beam 4", decoding=Decoding(beams=4)),
    HEAD,
    ADAPTER,
    Method("temperature", _seeded(lambda base: Temperature())),
    Method("vocabulary bias", _seeded(lambda base: VocabularyBias(base.vocabulary))),
    Method("backward attention, 3 heads", _head(dims=DIMS, heads=3)),
    Method("backward attention, 2 layers", _head(dims=DIMS // 2, layers=2)),
    Method("backward attention, gated", _head(dims=DIMS, latent=DIMS, gated=True)),
    Method("backward attention, literal", _head(dims=DIMS, form="literal")),
    Method("LoRA", _lora, of_model=True),
    Method("full fine-tuning", lambda base, seed: unfrozen(base.model), of_model=True),
)
