"""The published frontier: README and report agree with the committed records."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import msgspec
import pytest

import export.papers.frontier
from export.estimate.devices import DEFAULT_BOARD
from export.finetune import AVERAGED
from export.finetune.recipe import RESTORING
from export.papers.frontier.board import board_of
from export.papers.frontier.boards import BoardPlans, table_of
from export.papers.frontier.cli import frontier
from export.papers.frontier.records import read_family
from export.papers.frontier.report import headline, report_of
from export.papers.frontier.settings import DENSE, FROZEN, read_settings
from export.papers.frontier.summary import Frontier
from tests.support.task_data import invoke

RESULTS = Path(export.papers.frontier.__file__).parent / "results"
BOARDS = RESULTS.parent / "boards"
README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def published():
    return msgspec.json.decode((RESULTS / "frontier.json").read_bytes(), type=Frontier)


def test_readme_and_report_have_the_figures_of_the_records(published):
    assert "\n".join(headline(published)) in README.read_text()
    assert (RESULTS / "report.md").read_text() == report_of(published)


def test_the_predictions_on_a_jetson_are_those_of_today(published):
    """Those of the report by the sizes of layers, and those of the plans by the kernels of an engine."""
    families = [read_family(directory) for directory in sorted(RESULTS.glob("*-seed*"))]
    families.sort(key=lambda family: AVERAGED.index(family.answered.settings.task))  # as in sums of the summary
    assert board_of(families) == published.board
    for path in BOARDS.glob("*.json"):
        plans = msgspec.json.decode(path.read_bytes(), type=BoardPlans)
        assert path.with_suffix(".md").read_text() == table_of(plans)
        for row in plans.rows if plans.board == str(DEFAULT_BOARD) else ():
            same = [point for point in published.board.points if point.run == row.name]
            for point, planned in product(same, row.points):
                if (point.tokens, point.rows) == (planned.tokens, planned.batch):
                    assert point.times_faster == pytest.approx(planned.speedup, rel=0.15)
                    if row.name == DENSE:
                        assert point.milliseconds == pytest.approx(planned.milliseconds, rel=0.05)


def test_the_results_have_the_frozen_settings(published):
    frozen = read_settings(FROZEN, {})
    assert published.settings == msgspec.structs.replace(frozen, precision=published.settings.precision)
    assert set(published.seeds) == set(frozen.tasks)
    assert frozen.restoring(frozen.tasks["STS-B"]) == RESTORING  # which `fewheads reduce` prints


@pytest.mark.slow
def test_the_summary_is_that_of_the_records(tmp_path):
    for directory in RESULTS.glob("*-seed*"):
        (tmp_path / directory.name).symlink_to(directory)
    found = json.loads(invoke(frontier, "--report", "--out", tmp_path, "--no-plots", "--json"))
    assert found == json.loads((RESULTS / "frontier.json").read_bytes())
