"""Figures of a reduction: the size and the error of each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from export.figures import new_figure, write_figure
from export.reduce.run import ReducedRun as Reduced

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from export.reduce.comparison import PlanComparison

_BAR = 0.27


def draw(reduced: Reduced, path: str | Path) -> None:
    """Draw two panels over the layers: heads, their width and hidden units that stay, and the errors.

    Shares are of the original layer, with the numbers above the bars. Errors are those of
    :class:`export.reduce.plan.LayerReport`, measured on the calibration inputs. Errors as
    :func:`export.figures.write_figure`.
    """
    layers, dense = reduced.layers, reduced.dense
    figure = new_figure(6.0 + 1.2 * len(layers), 4.5)
    kept, errors = figure.subplots(1, 2)
    shapes = [layer.plan.shape for layer in layers]
    numbers = {
        f"heads of {dense.num_heads}": [shape.num_heads for shape in shapes],
        f"width of {dense.head_dim}": [shape.head_dim if shape.num_heads else 0 for shape in shapes],
        f"units of {dense.ffn_dim}": [shape.ffn_dim for shape in shapes],
    }
    whole = (dense.num_heads, dense.head_dim, dense.ffn_dim)
    shares = {
        name: [value / most for value in values] for (name, values), most in zip(numbers.items(), whole, strict=True)
    }
    original = [layer.number for layer in layers]
    _bars(kept, shares, list(numbers.values()), original)
    kept.set(title="size", ylabel="share of the original", ylim=(0, 1.15))
    _bars(
        errors,
        {
            "logits": [layer.logits_error for layer in layers],
            "attention's output": [layer.measured_attention_error for layer in layers],
            "feed-forward's output": [layer.measured_feed_forward_error for layer in layers],
        },
        layers=original,
    )
    errors.set(title="error", ylabel="mean square of the error over the variance")
    sizes = " and ".join(point.name for point in reduced.planned.points)
    figure.suptitle(
        f"{Path(reduced.directory).name}: {reduced.measured_speedup:.2f} times faster here, planned for "
        f"{reduced.planned.target_speedup:g} on {reduced.planned.device} at {sizes}"
    )
    write_figure(figure, path)


def draw_plans(compared: PlanComparison, path: str | Path) -> None:
    """Draw two panels over the layers: the attention and the hidden units that stay in the plan for each device."""
    dense = compared.dense
    figure = new_figure(6.0 + 1.2 * len(compared.plans[0].layers), 4.5)
    attention, units = figure.subplots(1, 2)
    whole = dense.num_heads * dense.head_dim
    names = [f"{plan.device} ({plan.label})" for plan in compared.plans]
    layers = [plan.layers for plan in compared.plans]
    heads = [[shape.num_heads * shape.head_dim / whole if shape else 0.0 for shape in shapes] for shapes in layers]
    hidden = [[shape.ffn_dim / dense.ffn_dim if shape else 0.0 for shape in shapes] for shapes in layers]
    for axes, shares, title in ((attention, heads, "attention"), (units, hidden, "hidden units")):
        _bars(axes, dict(zip(names, shares, strict=True)))
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=1, fontsize=8)
        axes.set(title=title, ylabel="share of the original", ylim=(0, 1.15))
    run = Path(compared.run).name
    sizes = " and ".join(point.name for point in compared.plans[0].points)
    figure.suptitle(f"{run}: plans for {compared.target_speedup:g} times at {sizes}")
    write_figure(figure, path)


def _bars(
    axes: Axes,
    series: Mapping[str, Sequence[float]],
    numbers: Sequence[Sequence[int]] = (),
    layers: Sequence[int] | None = None,
) -> None:
    width = min(_BAR, 0.81 / len(series))
    for index, (name, values) in enumerate(series.items()):
        middles = [layer + (index - (len(series) - 1) / 2) * width for layer in range(len(values))]
        bars = axes.bar(middles, values, width, label=name)
        if numbers:
            axes.bar_label(bars, [str(number) for number in numbers[index]], fontsize=7)
    axes.set_xlabel("layer")
    places = range(len(next(iter(series.values()))))
    axes.set_xticks(places, [str(number) for number in layers or places])
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, fontsize=8)
