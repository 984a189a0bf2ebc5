"""A plan: the shape of each layer, what it computes, and the most that it can give."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from edge.errors import Literally
from export.errors import PlanError
from export.transformer import LayerShape, TransformerConfig

#: How far a measured speed-up may lie above its bound: clocks are noisy, and what is no matrix product (softmax, GELU)
#: shrinks with heads and units too without being counted.
TOLERANCE = 0.10
_FIX = "Make a plan for this very model."


class LayerPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Plan for one layer.

    Attributes:
        shape: its heads, their width, and its hidden units.
        heads: which of the original heads stay, ascending; None leaves the choice to the calibration.
        neurons: which of the original hidden units stay, ascending; None likewise.
    """

    shape: LayerShape
    heads: tuple[int, ...] | None = None
    neurons: tuple[int, ...] | None = None


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Plan for all layers of a model.

    Attributes:
        dim: d, the width of a token.
        dense: the shapes that the layers have before.
        layers: what becomes of them.
    """

    dim: int
    dense: tuple[LayerShape, ...]
    layers: tuple[LayerPlan, ...]

    @classmethod
    def between(cls, dense: TransformerConfig, reduced: TransformerConfig) -> Plan:
        """Return what became of a model that was reduced already; which heads and neurons stayed is not known."""
        return cls(dense.dim, dense.layers, tuple(LayerPlan(shape) for shape in reduced.layers))

    def macs(self, tokens: int) -> int:
        """Return the multiplications of all layers for one input of ``tokens`` tokens."""
        return tokens * sum(macs_per_token(self.dim, layer.shape, tokens) for layer in self.layers)

    def dense_macs(self, tokens: int) -> int:
        """Return those of the original layers."""
        return tokens * sum(macs_per_token(self.dim, shape, tokens) for shape in self.dense)

    def removed_share(self, tokens: int) -> float:
        """Return p, the share of the multiplications that the plan does away with, 0 to 1."""
        return 1 - self.macs(tokens) / self.dense_macs(tokens)


def macs_per_token(dim: int, shape: LayerShape, tokens: int) -> int:
    """Return the multiplications of one layer for each of its ``tokens`` tokens.

    2d Σr_qk + 2d Σr_v + n (Σr_qk + Σr_v) + 2d f: projections, logits and weighted values, feed-forward.
    """
    width = shape.num_heads * shape.head_dim
    return 4 * dim * width + 2 * tokens * width + 2 * dim * shape.ffn_dim


def amdahl_bound(removed_share: float) -> float:
    """Return the largest speed-up from making a share p of the work free: 1 / (1 - p), infinite for all of it."""
    return 1 / (1 - removed_share) if removed_share < 1 else float("inf")


def check_speedup(plan: Plan, tokens: int, speedup: float, tolerance: float = TOLERANCE) -> float:
    """Refuse a speed-up that the removed work cannot explain.

    Args:
        plan: what was removed. Embeddings and heads of tasks are not counted; they would only lower the bound.
        tolerance: how far above the bound it may lie, as a share of the bound.

    Returns:
        The bound.

    Raises:
        PlanError: it lies further above; then the baseline or the measurement is wrong.
    """
    share = plan.removed_share(tokens)
    bound = amdahl_bound(share)
    if not speedup <= bound * (1 + tolerance):
        expected = (
            f"at most {bound:.3f} + {tolerance:.0%}, because {share:.1%} of the multiplications were removed "
            f"at {tokens} tokens"
        )
        fix = "Measure both models again, in turns, on the same runtime and otherwise idle."
        raise PlanError("speed-up", given=round(speedup, 3), expected=expected, fix=fix)
    return bound


def plan_of(config: TransformerConfig, shapes: Sequence[LayerShape]) -> Plan:
    """Return the plan that gives a model's layers these shapes.

    Raises:
        PlanError: it does not fit.
    """
    plan = Plan(config.dim, config.layers, tuple(LayerPlan(shape) for shape in shapes))
    check_plan(plan, config, "plan")
    return plan


def decode(data: bytes, config: TransformerConfig, subject: str) -> Plan:
    """Return a plan from its JSON, which ``msgspec.json.encode`` wrote.

    Raises:
        PlanError: it is malformed, or does not fit.
    """
    try:
        plan = msgspec.json.decode(data, type=Plan)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is a DecodeError
        raise PlanError(subject, given=Literally(error), expected="the fields of Plan", fix=_FIX) from None
    check_plan(plan, config, subject)
    return plan


def check_plan(plan: Plan, config: TransformerConfig, subject: str) -> None:
    """Check that a plan makes the layers of a model smaller.

    Raises:
        PlanError: the first thing that does not fit.
    """
    if (plan.dim, plan.dense) != (config.dim, config.layers):
        given = Literally("the plan of another model")
        raise PlanError(subject, given=given, expected=f"one for {len(config.layers)} layers of this", fix=_FIX)
    if len(plan.layers) != len(plan.dense):
        expected = f"{len(plan.dense)} layers"
        raise PlanError(subject, given=Literally(f"{len(plan.layers)} layers"), expected=expected, fix=_FIX)
    for number, (layer, dense) in enumerate(zip(plan.layers, plan.dense, strict=True)):
        place, new = f"{subject} layer {number}", layer.shape
        _check_at_most(place, "num_heads", new.num_heads, 0, dense.num_heads)
        _check_at_most(place, "head_dim", new.head_dim, 1 if new.num_heads else 0, dense.head_dim)
        _check_at_most(place, "ffn_dim", new.ffn_dim, 0, dense.ffn_dim)
        _check_choice(place, "heads", layer.heads, new.num_heads, dense.num_heads)
        _check_choice(place, "neurons", layer.neurons, new.ffn_dim, dense.ffn_dim)


def _check_at_most(place: str, field: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise PlanError(f"{place} field {field}", given=value, expected=f"{least} to {most}", fix=_FIX)


def _check_choice(place: str, field: str, chosen: tuple[int, ...] | None, number: int, of: int) -> None:
    if chosen is None:
        return
    if len(chosen) != number or list(chosen) != sorted(set(chosen) & set(range(of))):
        expected = f"{number} distinct numbers below {of}, ascending"
        raise PlanError(f"{place} field {field}", given=chosen, expected=expected, fix=_FIX)
