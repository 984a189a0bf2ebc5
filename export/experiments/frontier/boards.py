"""The published tiers planned anew for a Jetson, before any training: shapes and predicted speeds.

``python -m export.experiments.frontier.boards RUN`` takes an imported run of the model that the published families
start from. It writes a record and a table beside this module, in ``boards/``. The losses, which take the longest, are
kept beside RUN and reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
import numpy as np

from edge.files import write_whole
from edge.profiling.table import Label
from export.estimate.devices import board_mode
from export.experiments.frontier.records import ANSWERED, Answered
from export.experiments.frontier.settings import DENSE
from export.experiments.records import read_part
from export.options import DIRECTORY, imported_data_option
from export.points import Point, PointTimes
from export.reduction.device import Device, devices_of
from export.reduction.grid import grid_of
from export.reduction.options import reduction_progress
from export.reduction.reduce import measure_losses
from export.reduction.run import open_source, state_of
from export.reduction.search import choose_shapes
from export.runs import recorded
from export.tasks import needed_data
from export.transformer import LayerShape

_RESULTS, _BOARDS = (Path(__file__).with_name(name) for name in ("results", "boards"))
_SIZES = ((32, 1), (32, 8), (128, 1), (128, 8))
#: Published runs in the table, beside the dense one and the tiers.
_CONTROLS = ("third-first-layers", "third-uniform")
_EXAMPLES = 256


class BoardRow(msgspec.Struct, frozen=True):
    """A model at each operating point.

    Attributes:
        shapes: of its layers; None is left out. Empty for the mean over ``families``.
        families: whose shapes the times are a mean of; 0 for a new plan.
        loss: of a new plan, by the search; None for a published one, which is trained.
    """

    name: str
    shapes: tuple[LayerShape | None, ...]
    families: int
    points: tuple[PointTimes, ...]
    loss: float | None = None


class BoardPlans(msgspec.Struct, frozen=True):
    """Published and new tiers on a board."""

    board: str
    label: Label
    key: dict[str, str]
    rows: tuple[BoardRow, ...]


def plan_tiers(run: Path, data: Path, board: str, examples: int = _EXAMPLES) -> BoardPlans:
    """Predict the published tiers on a board, and plan them anew.

    The tiers have the targets of the published ones: once for 32 tokens at batch 1, and once for all operating points,
    each with the same share of the time of the dense model.

    Args:
        run: an imported run of the model of the published families.
        data: texts, for the losses.

    Raises:
        PlanError: a target is out of reach.
    """
    opened = open_source(run, data, examples)
    model, config, state = opened.model, opened.model.transformer.config, state_of(run, run)
    grid = grid_of(config)
    (even,) = devices_of([board_mode(board)], model, grid, [Point(*size) for size in _SIZES], state)
    weights = [1 / times.of(config.layers) for times in even.times]
    fair = [Point(*size, weight) for size, weight in zip(_SIZES, weights, strict=True)]
    device = even._replace(points=tuple(fair))
    short = device._replace(points=device.points[:1], times=device.times[:1])
    with reduction_progress() as (_, on_progress):
        losses = measure_losses(model, opened.data.train, grid, state=state, on_progress=on_progress)
    families = [read_part(path, Answered) for path in sorted(_RESULTS.glob(f"*/{ANSWERED}"))]
    targets = families[0].settings.frontier.tiers
    rows = [_published(name, families, device) for name in (DENSE, *targets, *_CONTROLS)]
    for where, words in ((short, "32 tokens, batch 1"), (device, "all four")):
        for tier, target in targets.items():
            shapes = choose_shapes(config.layers, losses, where.mean, target, f"{tier} on {where.name}")
            loss = sum(one.of(grid, shape) for one, shape in zip(losses, shapes, strict=True))
            points = device.at_points(config.layers, shapes)
            rows.append(BoardRow(f"{tier}, planned for {words}", tuple(shapes), 0, points, loss))
    return BoardPlans(board, device.label, device.key, tuple(rows))


def _published(name: str, families: Sequence[Answered], device: Device) -> BoardRow:
    """Return the mean times of a published run over the families that have it."""
    found = [(family.layers[DENSE], family.layers[name]) for family in families if name in family.layers]
    every = zip(*(device.at_points(dense, shapes) for dense, shapes in found), strict=True)
    points = tuple(
        msgspec.structs.replace(
            same[0],
            milliseconds=float(np.mean([one.milliseconds for one in same])),
            low_ms=float(np.mean([one.low_ms for one in same if one.low_ms])),
            high_ms=float(np.mean([one.high_ms for one in same if one.high_ms])),
        )
        for same in every
    )
    alike = {shapes for _, shapes in found}
    return BoardRow(name, alike.pop() if len(alike) == 1 else (), len(found), points)


def table_of(plans: BoardPlans) -> str:
    """Return the document of a record."""
    sizes = " | ".join(point.name for point in plans.rows[0].points)
    lines = [
        f"# The published tiers on {plans.board}",
        "",
        "**These are predictions, not measurements on a board.** The speeds are predicted ratios to the dense model, "
        f"in {plans.key['precision'].upper()} by `export/estimate`; {plans.key['kernels']}. The dense row has",
        "milliseconds. Published tiers are means over their families; new ones are planned before any training, with",
        "the published targets: for 32 tokens at batch 1, or for all four sizes, each with the same share of the time.",
        "",
        f"| tier | {sizes} | layers: heads x width, hidden units |",
        f"| --- |{' ---: |' * len(plans.rows[0].points)} --- |",
    ]
    for row in plans.rows:
        dense = row.name == DENSE
        cells = [f"{one.milliseconds:.2f} ms" if dense else f"{one.speedup:.2f}" for one in row.points]
        shapes = "; ".join(_words(shape) for shape in row.shapes) or f"of {row.families} families"
        lines.append(f"| {row.name} | {' | '.join(cells)} | {shapes} |")
    return "\n".join(lines) + "\n"


def _words(shape: LayerShape | None) -> str:
    if shape is None:
        return "left out"
    heads = f"{shape.num_heads} x {shape.head_dim}" if shape.num_heads else "none"
    return f"{heads}, {shape.ffn_dim}"


@click.command()
@click.argument("run", type=DIRECTORY)
@imported_data_option
@click.option("--for", "board", default="orin-nano-super:15W", show_default=True, help="The board and its power mode.")
def main(run: Path, data: Path | None, board: str) -> None:
    """Plan the published tiers for a board, and write a record and a table."""
    plans = plan_tiers(run, needed_data(recorded(run), None, data), board)
    place = _BOARDS / board.replace(":", "-")
    write_whole(place.with_suffix(".json"), msgspec.json.format(msgspec.json.encode(plans), indent=1) + b"\n")
    write_whole(place.with_suffix(".md"), table_of(plans).encode())
    click.echo(table_of(plans))


if __name__ == "__main__":
    main()
