"""The frame of experiments, with an experiment of two parts whose record counts the computations in a file."""

import json
import lzma
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from edge.errors import UsageError
from export.errors import CheckpointError, JobError
from export.papers.experiment import (
    Experiment,
    Part,
    compute_parts,
    read_records,
    read_settings,
    report_experiment,
    run_experiment,
)
from export.report.drawing import finish_axes, new_figure, plot_points
from export.report.table import Table
from export.training.intervals import Difference, Mean
from tests.support.commands import SECONDS

ROOT = Path(__file__).parents[2]


class Settings(msgspec.Struct):
    factor: int
    seeds: int = 2


class Product(msgspec.Struct):
    value: int
    process: int


class Products(Experiment[Product]):
    """A part for each seed; those that a file in ``marks`` names fail, and all leave their name there."""

    title, extensible, record = "Products", ("seeds",), Product

    def __init__(self, settings, marks):
        self.settings, self.marks = settings, marks

    def parts(self):
        return [Part(f"seed{seed}", (seed,)) for seed in range(self.settings.seeds)]

    def compute(self, part, watch):
        watch.on_part("products", 0, 1)
        with open(self.marks / "computed", "a") as file:
            file.write(f"{part.name} ")
        (failing,) = [path.read_text() for path in self.marks.glob("failing")] or [""]
        if failing == part.name:
            raise ValueError(f"no product for {part.name}")
        if failing == "kill":
            os.kill(os.getpid(), 9)
        return Product(part.arguments[0] * self.settings.factor, os.getpid())

    def text(self, records):
        return f"Sum: {sum(record.value for record in records.values())}."

    def tables(self, records):
        rows = [(name, record.value, None) for name, record in records.items()]
        ends = ("mean", Mean(0.5, (0.25, 1 / 3)), Difference(1, (-1, 2)))
        return [Table("By seed", ("part", "product", "change"), [*rows, ends], note="Two columns of numbers.")]

    def figures(self, records):
        figure = new_figure(2, 2)
        axes = figure.subplots()
        values = [record.value for record in records.values()]
        plot_points(axes, range(len(values)), values, [(value - 1, value + 2) for value in values], label="products")
        finish_axes(axes, title="Products", xlabel="seed")
        (bars,) = axes.collections
        assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[v - 1, v + 2] for v in values]
        return {"products": figure}


@pytest.fixture
def marks(tmp_path):
    (tmp_path / "marks").mkdir()
    return tmp_path / "marks"


def computed(marks):
    return (marks / "computed").read_text().split()


def test_parts_are_recorded_once_and_reported(tmp_path, marks, capsys):
    out = tmp_path / "out"
    records = run_experiment(Products(Settings(5), marks), out)
    assert {name: record.value for name, record in records.items()} == {"seed0": 0, "seed1": 5}
    assert records["seed1"].process == os.getpid()
    assert (out / "report.md").read_text() == (
        "# Products\n\nSum: 5.\n\n## By seed\n\nTwo columns of numbers.\n\n"
        "| part | product | change |\n| --- | ---: | ---: |\n| seed0 | 0 |  |\n| seed1 | 5 |  |\n"
        "| mean | 0.500 (0.250 … 0.333) | +1.0 (-1.0 … +2.0) |\n\n![products](products.png)\n"
    )
    assert (out / "products.png").read_bytes().startswith(b"\x89PNG")
    assert "seed1" in capsys.readouterr().out
    run_experiment(Products(Settings(5, seeds=3), marks), out, as_json=True, plots=False)
    captured = capsys.readouterr()
    assert computed(marks) == ["seed0", "seed1", "seed2"]
    assert "2 of 3 parts were computed earlier" in captured.err
    printed = json.loads(captured.out)
    assert printed["tables"][0]["rows"][2:] == [
        ["seed2", 10, None],
        ["mean", {"value": 0.5, "interval": [0.25, 1 / 3]}, {"value": 1, "interval": [-1, 2]}],
    ]
    assert (printed["missing"], printed["text"]) == (0, "Sum: 15.")
    assert read_settings(out, Settings) == Settings(5, seeds=3)


def test_other_settings_are_refused(tmp_path, marks):
    out = tmp_path / "out"
    run_experiment(Products(Settings(5), marks), out, plots=False)
    with pytest.raises(UsageError, match=r"--out .*: got factor 5, expected factor 6\. Give the earlier options"):
        run_experiment(Products(Settings(6), marks), out, plots=False)
    (out / "settings.json").write_text("[]")
    with pytest.raises(UsageError, match=r"settings\.json: got .*, expected settings of an experiment"):
        run_experiment(Products(Settings(5), marks), out, plots=False)
    with pytest.raises(UsageError, match=r"settings\.json: got .*, expected settings of an experiment"):
        read_settings(out, Settings)
    (out / "settings.json").unlink()
    with pytest.raises(UsageError, match=r"got results without settings, expected settings\.json beside them"):
        run_experiment(Products(Settings(5), marks), out, plots=False)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--out .*file: got .*, expected a directory to write"):
        run_experiment(Products(Settings(5), marks), tmp_path / "file", plots=False)


def test_an_unfinished_line_is_computed_again_and_a_malformed_one_reported(tmp_path, marks):
    out = tmp_path / "out"
    run_experiment(Products(Settings(5), marks), out, plots=False)
    lines = (out / "records.jsonl").read_bytes()
    (out / "records.jsonl").write_bytes(lines[:-3])
    assert list(read_records(out, Product)) == ["seed0"]
    run_experiment(Products(Settings(5), marks), out, plots=False)
    assert computed(marks) == ["seed0", "seed1", "seed1"]
    assert [json.loads(line)["part"] for line in (out / "records.jsonl").read_text().splitlines()] == ["seed0", "seed1"]
    (out / "records.jsonl.xz").write_bytes(lzma.compress(lines))
    (out / "records.jsonl").unlink()
    assert list(read_records(out, Product)) == ["seed0", "seed1"]
    (out / "records.jsonl").write_bytes(b"{}\n" + lines)
    with pytest.raises(CheckpointError, match=r"records\.jsonl, line 1: got .*, expected a record\. Delete the line"):
        run_experiment(Products(Settings(5), marks), out, plots=False)


KILLED = """
import sys
from pathlib import Path
from export.papers.experiment import run_experiment
from tests.export.test_papers_experiment import Products, Settings
marks = Path(sys.argv[1])
run_experiment(Products(Settings(5), marks), marks.parent / "out", plots=False)
(marks / "failing").write_text("kill")
run_experiment(Products(Settings(5, seeds=4), marks), marks.parent / "out", plots=False)
"""


def test_a_killed_experiment_resumes_at_its_part(tmp_path, marks):
    process = subprocess.run([sys.executable, "-c", KILLED, marks], cwd=ROOT, timeout=SECONDS, capture_output=True)
    assert process.returncode == -9, process.stderr
    (marks / "failing").unlink()
    records = run_experiment(Products(Settings(5, seeds=4), marks), tmp_path / "out", plots=False)
    assert computed(marks) == ["seed0", "seed1", "seed2", "seed2", "seed3"]
    assert [record.value for record in records.values()] == [0, 5, 10, 15]


def test_a_failed_part_leaves_those_beside_it_and_is_missing_in_the_report(tmp_path, marks, capsys):
    out = tmp_path / "out"
    (marks / "failing").write_text("seed0")
    with pytest.raises(JobError, match="1 of 3 that failed: seed0"):
        compute_parts(Products(Settings(5, seeds=3), marks), out, as_jobs=True, jobs=2)
    assert "job seed0: got ValueError: no product for seed0" in capsys.readouterr().err
    assert "no product for seed0" in (out / "logs/seed0.log").read_text()
    records = report_experiment(Products(Settings(5, seeds=3), marks), out, plots=False)
    assert list(records) == ["seed1", "seed2"]
    assert os.getpid() not in {record.process for record in records.values()}
    assert re.search("Sum: 15.\n\n1 of 3 parts are still to be computed.\n", (out / "report.md").read_text())
