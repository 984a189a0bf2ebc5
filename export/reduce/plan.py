"""What a reduction plans and what it reports, of any kind of model; cost of a plan, and its largest speed-up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from torch import nn

from edge.errors import Raw
from export.errors import PlanError
from export.models.transformer import LayerShape, TransformerConfig
from export.training.runs import RunMetrics

ModelT = TypeVar("ModelT", bound=nn.Module)

#: Allowed distance of a measured speed-up above its bound: clocks are noisy, and softmax and GELU, which are not
#: counted, shrink with heads and units too.
TOLERANCE = 0.10


class LayerPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Plan for one layer.

    Attributes:
        shape: its heads, their width, and its hidden units. In language models, a head is one of keys and values, with
            all heads of queries that share it, and its width is that of all these queries.
        heads: the original heads that stay, ascending; None before the calibration has chosen them.
        neurons: the original hidden units that stay, likewise.
    """

    shape: LayerShape
    heads: tuple[int, ...] | None = None
    neurons: tuple[int, ...] | None = None


class ReductionPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Plan for all layers of a model.

    Attributes:
        dim: d, the width of a token.
        layers: None is left out, with its normalisations.
    """

    dim: int
    dense: tuple[LayerShape, ...]
    layers: tuple[LayerPlan | None, ...]

    @property
    def kept(self) -> tuple[int, ...]:
        """The numbers of the original layers that stay, from 0."""
        return tuple(number for number, layer in enumerate(self.layers) if layer)

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """The shapes of the layers that stay."""
        return tuple(layer.shape for layer in self.layers if layer)

    def macs(self, tokens: int) -> int:
        """Return the multiplications of all layers for one input of ``tokens`` tokens."""
        return tokens * sum(macs_per_token(self.dim, shape, tokens) for shape in self.shapes)

    def dense_macs(self, tokens: int) -> int:
        """Return those of the original layers."""
        return tokens * sum(macs_per_token(self.dim, shape, tokens) for shape in self.dense)

    def removed_share(self, tokens: int) -> float:
        """Return p, the share of the multiplications that the plan removes, 0 to 1."""
        return 1 - self.macs(tokens) / self.dense_macs(tokens)


class LayerReport(msgspec.Struct, frozen=True):
    """Result of reducing a layer. Errors are mean squares, relative to the variance of the original.

    Attributes:
        plan: its shape, and the heads and hidden units that stay.
        logits_error: of attention logits, from the new width of heads; predicted.
        attention_error: of the attention's output, from fewer heads and smaller values; predicted.
        measured_attention_error: of the attention's output, from all causes, on the calibration inputs.
        feed_forward_error: of the feed-forward's output; predicted.
        measured_feed_forward_error: of the feed-forward's output, on the calibration inputs.
        number: of the original layer, from 0.
        head_scores: of language models, for each original head the loss of its removal after the heads that go before
            it: the mean square by which it moves the logits.
    """

    plan: LayerPlan
    logits_error: float = 0.0
    attention_error: float = 0.0
    measured_attention_error: float = 0.0
    feed_forward_error: float = 0.0
    measured_feed_forward_error: float = 0.0
    number: int = 0
    head_scores: tuple[float, ...] = ()


@dataclass(frozen=True)
class ReducedModel(Generic[ModelT]):
    """A smaller model in evaluation mode, its plan with the heads and hidden units that stay, and a report a layer."""

    model: ModelT
    plan: ReductionPlan
    reports: tuple[LayerReport, ...]


class ReducedRun(msgspec.Struct, frozen=True):
    """A directory with a smaller model, its layers, and its metrics."""

    directory: str
    layers: tuple[LayerReport, ...]
    metrics: RunMetrics


def macs_per_token(dim: int, shape: LayerShape, tokens: int) -> int:
    """Return the multiplications of one layer for each of its ``tokens`` tokens.

    2d Σr_qk + 2d Σr_v + n (Σr_qk + Σr_v) + 2d f: projections, logits and weighted values, feed-forward.
    """
    width = shape.num_heads * shape.head_dim
    return 4 * dim * width + 2 * tokens * width + 2 * dim * shape.ffn_dim


def amdahl_bound(removed_share: float) -> float:
    """Return the largest speed-up if a share p of the work becomes free: 1 / (1 - p), infinite for p = 1."""
    return 1 / (1 - removed_share) if removed_share < 1 else float("inf")


def check_speedup(plan: ReductionPlan, tokens: int, speedup: float) -> float:
    """Check that the removed work can explain a speed-up, and return the largest one that it explains.

    Args:
        plan: its layers alone count; embeddings and task heads would lower the bound.

    Raises:
        PlanError: the speed-up is larger, so that the baseline or the measurement is wrong.
    """
    share = plan.removed_share(tokens)
    bound = amdahl_bound(share)
    if not speedup <= bound * (1 + TOLERANCE):
        expected = (
            f"at most {bound:.3f} + {TOLERANCE:.0%}, because {share:.1%} of the multiplications were removed "
            f"at {tokens} tokens"
        )
        fix = "Measure both models again, in turns, on the same runtime and otherwise idle."
        raise PlanError("speed-up", given=round(speedup, 3), expected=expected, fix=fix)
    return bound


def plan_of(config: TransformerConfig, shapes: Sequence[LayerShape | None]) -> ReductionPlan:
    """Return the plan with a shape for each layer of a model, or None for one that is left out.

    Raises:
        PlanError: no layer stays, or a shape is larger than its layer.
    """
    for number, (shape, dense) in enumerate(zip(shapes, config.layers, strict=True)):
        for field in ("num_heads", "head_dim", "ffn_dim") if shape else ():
            value, most = getattr(shape, field), getattr(dense, field)
            if value > most:
                subject, fix = f"plan layer {number} field {field}", "Make a plan for this very model."
                raise PlanError(subject, given=value, expected=f"at most {most}", fix=fix)
    if not any(shapes):
        raise PlanError("plan", given=Raw("no layer"), expected="one layer at least", fix="Keep one.")
    return ReductionPlan(config.dim, config.layers, tuple(LayerPlan(shape) if shape else None for shape in shapes))


def words_of(shapes: Sequence[LayerShape | None]) -> str:
    """Return the shapes of layers in words, equal ones together; None is left out."""
    words = []
    for shape, number in Counter(shapes).items():
        size = "left out"
        if shape is not None:
            size = f"of {shape.num_heads} heads of {shape.head_dim} and {shape.ffn_dim} hidden units"
        words.append(f"{number} layer{'s' * (number > 1)} {size}")
    return ", ".join(words)
