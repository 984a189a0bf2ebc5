import json
import re
import shutil
import sys

import msgspec
import numpy as np
import pytest
import scipy.special
import sklearn.metrics

from edge.bench.layer_latencies import Shape
from edge.errors import UsageError
from export.cli.finetune import finetune
from export.cli.report import report
from export.finetune.models import open_model
from export.finetune.predictions import read_predictions
from export.report.numbers import Classes, ClassRow, calibration_error
from export.report.page import confusion
from export.report.speed import speed_of
from export.training.intervals import Mean
from export.training.points import Planned, PointTimes
from export.training.runs import CONFIG, REPORT, Speedup, is_run, read_config
from tests.support.task_data import invoke

pytest.importorskip("matplotlib")


def test_the_calibration_error_is_the_mean_gap_of_ten_bins():
    confidence, right = np.array([0.95, 0.95, 0.95, 0.95, 0.62, 1.0]), np.array([1, 1, 0, 0, 1, 1], dtype=bool)
    # |2 - 3.8 + 1 - 1| of the last bin, which has 1.0, and |1 - 0.62|.
    assert calibration_error(confidence, right) == pytest.approx((1.8 + 0.38) / 6)


def test_the_report_of_a_run_on_glue_has_the_numbers_of_its_predictions(place, tmp_path):
    run = place / "SST-2"
    assert (run / REPORT).exists()
    assert is_run(run)
    out = tmp_path / "page.html"
    found = json.loads(invoke(report, run, "--data-dir", place, "--out", out, "--json"))
    holdout, dev = found["splits"]
    kept = read_predictions(run, "dev")
    score = sklearn.metrics.precision_recall_fscore_support
    precision, recall, f1, support = score(kept.targets, kept.answers, zero_division=0)
    rows = dev["classes"]["rows"]
    assert [row["label"] for row in rows] == ["negative", "positive"]
    assert [row["n"] for row in rows] == support.tolist()
    assert [row["f1"] for row in rows] == pytest.approx(f1.tolist())
    assert [row["recall"]["value"] for row in rows] == pytest.approx(recall.tolist())
    assert [row["precision"]["value"] for row in rows] == pytest.approx(precision.tolist())
    assert all(row["recall"]["interval"][0] < row["recall"]["value"] for row in rows)
    matrix = sklearn.metrics.confusion_matrix(kept.targets, kept.answers)
    assert dev["classes"]["confusion"] == matrix.tolist()
    assert len(dev["classes"]["errors"]) == (kept.targets != kept.answers).sum()
    assert sum(one["n"] for one in dev["classes"]["bins"]) == dev["n"] == 40
    assert (holdout["name"], [file["name"] for file in found["files"]]) == ("holdout", ["train.tsv", "dev.tsv"])
    assert [(row["name"], row["rows"]) for row in found["rows"]] == [("train", 323), ("holdout", 37), ("dev", 40)]
    probabilities = scipy.special.softmax(kept.logits, axis=1).max(axis=1)
    expected_error = calibration_error(probabilities, kept.answers == kept.targets)
    assert dev["classes"]["calibration_error"] == pytest.approx(expected_error)
    page = out.read_text()
    assert f"<p>Expected calibration error over ten bins: {expected_error:.3f}.</p>" in page
    assert found["files"][0]["sha256"] in page
    assert len(re.findall("<svg", page)) == 5  # the curve, and confusion and calibration of both splits
    assert not re.findall(r"<script|(?:src|href)=\"(?!data:|#)", page)
    assert "<h2>dev, 40 items</h2>" in page
    assert page.count("<p>There are none.</p>") == 2
    for row in ("train", "323", "–"), ("holdout", "37", "0"), ("dev", "40", "0"):
        cells = [f"<td>{row[0]}</td>", *(f'<td class="n">{cell}</td>' for cell in row[1:])]
        assert "".join(cells) in page


def test_the_speed_of_a_run_is_measured_or_labelled_as_a_prediction(place, tmp_path):
    run, out = shutil.copytree(place / "SST-2", tmp_path / "half"), tmp_path / "page.html"
    data = ("--data-dir", place, "--out", out, "--replace")
    speed = json.loads(invoke(report, run, *data, "--json"))["speed"]
    assert speed["measured"] is None
    assert [(one["tokens"], one["rows"], one["times_faster"]) for one in speed["predicted"]] == [(32, 1, 1), (32, 8, 1)]
    assert "Measured when" not in out.read_text()
    config = read_config(run)
    layers = tuple(map(Shape.of, open_model(run).transformer.config.layers))
    for original in (2 * layers, ()):  # runs of earlier versions do not record it
        reduced = msgspec.structs.replace(config, speedup=Speedup(1.94, 32, original))
        (run / CONFIG).write_bytes(msgspec.json.encode(reduced))
        invoke(report, run, *data)
        page = out.read_text()
        assert "Measured when it was reduced: 1.94 times as fast as the model that it was reduced from, at 32" in page
        assert "TensorRT in FP16 on a Jetson Orin Nano Super at 15W: a prediction, not measured on an Orin" in page
        found = json.loads(invoke(report, run, *data, "--json"))["speed"]["predicted"]
        assert [one["milliseconds"] for one in found] == [one["milliseconds"] for one in speed["predicted"]]
        for one in found:
            assert one["low_ms"] < one["milliseconds"] < one["high_ms"]
            assert f"{one['low_ms']:.2f} … {one['high_ms']:.2f}" in page
            if original:
                assert 1.5 < one["times_faster"] < 2  # half of the layers, and the same embeddings and head
                assert f'<td class="n">{one["times_faster"]:.2f}</td>' in page
            else:
                assert one["times_faster"] is None
    points = (PointTimes(32, 1, dense_ms=2, milliseconds=1), PointTimes(32, 8, dense_ms=4, milliseconds=3))
    planned = msgspec.structs.replace(reduced, planned=Planned(2.0, "this", "measured", points, (0,), 2))
    architecture = msgspec.structs.replace(open_model(run).architecture, max_length=24)
    found = speed_of(planned, architecture)
    assert found.measured_where == "by the mean time at 32 tokens, batch 1 and 32 tokens, batch 8"
    assert {one.tokens for one in found.predicted} == {24}  # the bundle takes no more


def test_a_report_states_on_how_many_items_of_the_training_split_a_run_was_trained(place, tmp_path):
    run, data, out = tmp_path / "few", ("--data-dir", place), tmp_path / "page.html"
    tuning = ("--limit", 20, "--epochs", 1, "--max-length", 32, "--name", "few", "--no-report")
    invoke(finetune, "SST-2", "--model", place / "model", *data, *tuning, "--out", tmp_path)
    invoke(report, run, *data, "--out", out)
    assert "The run was trained on 20 of the 323 items of the training split" in out.read_text()
    assert out.read_text().count('<th class="n">training split</th>') == 1  # without --final, of the hold-out alone
    found = json.loads(invoke(report, place / "SST-2", *data, "--out", out, "--replace", "--json"))
    assert (found["metrics"]["trained_on"], found["rows"][0]["rows"]) == (323, 323)


def test_tables_of_a_run_that_has_its_page_leave_the_page_alone(place):
    run, data = place / "SST-2", ("--data-dir", place)
    (run / REPORT).write_text("as finetune wrote it")
    printed = invoke(report, run, *data)
    assert f"The page is {run / REPORT}, as before; --replace writes it again." in printed.replace("\n", " ")
    assert (run / REPORT).read_text() == "as finetune wrote it"
    invoke(report, run, *data, "--replace")
    assert "<svg" in (run / REPORT).read_text()
    (run / REPORT).unlink()
    assert f"The page is {run / REPORT}." in invoke(report, run, *data).replace("\n", " ")
    assert (run / REPORT).exists()


def test_numbers_alone_need_no_page_and_no_matplotlib(place, tmp_path, monkeypatch):
    run = place / "SST-2"
    kept = (run / REPORT).stat().st_mtime_ns
    asked = (run, "--data-dir", place, "--json")
    expected = json.loads(invoke(report, *asked, "--out", tmp_path / "page.html"))
    for module in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # an import raises ImportError
    assert json.loads(invoke(report, *asked)) == expected
    assert (run / REPORT).stat().st_mtime_ns == kept
    with pytest.raises(UsageError, match=r"got no matplotlib, .* or give --json without --out for the numbers alone"):
        invoke(report, *asked, "--out", tmp_path / "other.html")


def test_labels_of_any_script_are_escaped_in_figures():
    rows = tuple(ClassRow(label, 1, 1, 1, None, None, 0.0) for label in ("<b>&", "日本", "$x"))
    drawn = confusion(Classes("日本", Mean(0, (0, 0)), rows, ((1, 0, 0), (0, 1, 0), (0, 1, 0)), 0.0, (), ()))
    assert "&lt;b&gt;&amp;</text>" in drawn
    assert drawn.count("日本</text>") == drawn.count("$x</text>") == 2
