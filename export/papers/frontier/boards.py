"""The published tiers planned anew for a Jetson, before any training: shapes and predicted speeds.

``python -m export.papers.frontier.boards RUN`` takes an imported run of the model that the published families
start from. It writes a record and a table beside this module, in ``boards/``. The losses, which take the longest, are
kept beside RUN and reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

import click
import msgspec
import numpy as np

from edge.bench.layer_latencies import Label
from edge.files import write_whole
from export.estimate.devices import BOARD_MODES, DEFAULT_BOARD
from export.finetune import needed_data
from export.models.transformer import LayerShape
from export.papers.experiment import read_records
from export.papers.frontier.records import DENSE, Answered, Record
from export.reduce.device import Device, devices_of
from export.reduce.losses import measure_losses
from export.reduce.options import reduction_progress
from export.reduce.run import open_source
from export.reduce.search import choose_shapes
from export.reduce.target import CALIBRATION_EXAMPLES
from export.report.table import Table, write_pages
from export.training.options import DIRECTORY, imported_data_option
from export.training.points import Point, PointTimes
from export.training.runs import recorded

_RESULTS, _BOARDS = (Path(__file__).with_name(name) for name in ("results", "boards"))
_SIZES = ((32, 1), (32, 8), (128, 1), (128, 8))
#: Published runs in the table, beside the dense one and the tiers.
_CONTROLS = ("third-first-layers", "third-uniform")
#: Whole layers, counted from 0, for comparison.
_WHOLE_LAYERS = ((1, 3, 5), (2, 5))
#: Those of the published tiers.
_TARGETS = {"half": 2.03, "third": 2.95, "quarter": 3.75}


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
    """Published and new tiers on a board; the losses are measured on so many examples."""

    board: str
    label: Label
    key: dict[str, str]
    examples: int
    rows: tuple[BoardRow, ...]


def plan_tiers(run: Path, data: Path, board: str) -> BoardPlans:
    """Predict the published tiers on a board, and plan them anew, or raise a PlanError if a target is out of reach.

    For 32 tokens at batch 1, and for all operating points, each with the same share of the dense model's time.

    Args:
        run: an imported run of the model of the published families.
        data: texts, for the losses.
    """
    opened = open_source(run, data, run, CALIBRATION_EXAMPLES)
    dense, grid = opened.layers, opened.grid
    with reduction_progress() as (on_progress, _):
        (even,) = devices_of(
            [BOARD_MODES[board]], opened.model, [Point(*size) for size in _SIZES], opened.state, on_progress=on_progress
        )
        losses = measure_losses(opened.model, opened.data.train, grid, state=opened.state, on_progress=on_progress)
    weights = [1 / times.of(dense) for times in even.times]
    fair = [Point(*size, weight) for size, weight in zip(_SIZES, weights, strict=True)]
    device = even._replace(points=tuple(fair))
    short = device._replace(points=device.points[:1], times=device.times[:1])
    records = read_records(_RESULTS, Record).values()
    families = sorted((one.answered for one in records if one.answered), key=lambda one: (one.task, one.seed))
    targets = _TARGETS
    rows = [_published(name, families, device) for name in (DENSE, *targets, *_CONTROLS)]
    plans: dict[str, Sequence[LayerShape | None]] = {
        f"layers {', '.join(map(str, kept))}": [shape if number in kept else None for number, shape in enumerate(dense)]
        for kept in _WHOLE_LAYERS
    }
    for where, words in ((short, device.points[0].name), (device, "all sizes")):
        for tier, target in targets.items():
            shapes = choose_shapes(dense, losses, where.mean, target, f"{tier} on {where.name}")
            plans[f"{tier}, planned for {words}"] = shapes
    for name, planned in plans.items():
        loss = sum(one.of(device.mean.grid, shape) for one, shape in zip(losses, planned, strict=True))
        rows.append(BoardRow(name, tuple(planned), 0, device.at_points(dense, planned), loss))
    return BoardPlans(board, device.label, device.key, CALIBRATION_EXAMPLES, tuple(rows))


def _published(name: str, families: Sequence[Answered], device: Device) -> BoardRow:
    """Return the mean times of a published run over the families that have it."""
    pairs = [(family.layers[DENSE], family.layers[name]) for family in families if name in family.layers]
    every = zip(*(device.at_points(dense, shapes) for dense, shapes in pairs), strict=True)
    fields = ("milliseconds", "low_ms", "high_ms")
    points = tuple(
        msgspec.structs.replace(
            same[0], **{field: float(np.mean([getattr(one, field) for one in same])) for field in fields}
        )
        for same in every
    )
    alike = {shapes for _, shapes in pairs}
    return BoardRow(name, alike.pop() if len(alike) == 1 else (), len(pairs), points)


def table_of(plans: BoardPlans) -> str:
    """Return the document of a record."""
    paragraphs = (
        f"**Predictions, not measurements on a board**, in {plans.key['precision'].upper()}, by `export/estimate`: "
        "speeds relative to the dense model, whose row has milliseconds with their error band. Kernels are "
        f"{plans.key['kernels']}.",
        "Published tiers are means over their families. New ones have the published targets, for one size alone, or "
        "for all sizes, each with the same share of the dense model's time. They are planned before any training. The "
        "loss, which the search adds up over the layers, is the squared distance of embeddings to the original's, of "
        f"{plans.examples} texts; it says little about what a distillation restores. A layer is written as heads x "
        "width, hidden units.",
    )
    rows = []
    for row in plans.rows:
        cells = (
            f"{one.milliseconds:.2f} ms ({one.low_ms:.2f} … {one.high_ms:.2f})"
            if row.name == DENSE
            else f"{one.speedup:.2f}"
            for one in row.points
        )
        shapes = "; ".join(_words(shape) for shape in row.shapes) or f"of {row.families} families"
        rows.append((row.name, *cells, "" if row.loss is None else f"{row.loss:.3f}", shapes))
    heads = ("tier", *(point.name for point in plans.rows[0].points), "loss", "layers")
    table = Table("", heads, rows).markdown()
    commands = (
        "fewheads import all-MiniLM-L6-v2 --out runs/minilm --data texts.txt",
        f"python -m export.papers.frontier.boards runs/minilm --for {plans.board}",
    )
    wrapped = (line for text in paragraphs for line in (*wrap(text, 120, break_long_words=False), ""))
    return "\n".join([f"# The published tiers on {plans.board}", "", *wrapped, *table, "", "```", *commands, "```", ""])


def pages() -> dict[Path, str]:
    """Return the document of each record."""
    records = {path.with_suffix(".md"): path.read_bytes() for path in _BOARDS.glob("*.json")}
    return {page: table_of(msgspec.json.decode(data, type=BoardPlans)) for page, data in records.items()}


def _words(shape: LayerShape | None) -> str:
    if shape is None:
        return "left out"
    return f"{f'{shape.num_heads} x {shape.head_dim}' if shape.num_heads else 'none'}, {shape.ffn_dim}"


@click.command()
@click.argument("run", type=DIRECTORY)
@imported_data_option
@click.option(
    "--for",
    "board",
    type=click.Choice([*BOARD_MODES]),
    default=str(DEFAULT_BOARD),
    show_default=True,
    help="The board and its power mode.",
)
def main(run: Path, data: Path | None, board: str) -> None:
    """Plan the published tiers for a board, and write a record and a table."""
    plans = plan_tiers(run, needed_data(recorded(run), None, data), board)
    record = msgspec.json.format(msgspec.json.encode(plans), indent=1) + b"\n"
    write_whole(_BOARDS / f"{board.replace(':', '-')}.json", record)
    write_pages(pages())
    click.echo(table_of(plans))


if __name__ == "__main__":
    main()
