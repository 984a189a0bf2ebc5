import json
import re
import shutil

import pytest
from click.testing import CliRunner

from edge.cli import output
from edge.errors import UsageError
from export.errors import DataError, ReductionError
from export.reduction.cli import reduce
from export.runs import CONFIG
from export.tasks.cli import finetune
from export.tasks.models import find, find_tuned
from tests.export.task_data import invoke, make_transformer, write_model, write_sst2


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with data, a run on SST-2, and the run that it was reduced to."""
    root = tmp_path_factory.mktemp("reduction")
    write_sst2(root)
    write_model(root / "model", make_transformer())
    options = ("--data-dir", root, "--lr", 2e-2, "--max-length", 32)
    invoke(finetune, "SST-2", "--model", root / "model", "--out", root, *options)
    return root


def test_a_run_becomes_a_smaller_run_that_can_be_fine_tuned(place):
    options = ("--data-dir", place, "--calibration", 200, "--tokens", 16, "--target-speedup", 1.05)
    result = json.loads(invoke(reduce, place / "SST-2", *options, "--out", place / "small", "--json"))
    measures = {(m["split"], m["metric"]): m["value"] for m in result["metrics"]["measures"]}
    assert measures["dev", "accuracy"] > 0.8
    assert result["expected_speedup"] >= 1.05
    assert result["measured"]["ratio"] > 0.7
    small = find_tuned(place / "small", "SST-2").transformer.config
    units = [layer["plan"]["shape"]["ffn_dim"] for layer in result["layers"]]
    assert units == [shape.ffn_dim for shape in small.layers]
    assert small.layers != find(place / "SST-2").transformer.config.layers
    assert sorted(path.name for path in (place / ".SST-2.reduction").iterdir()) == ["latency.json", "losses.state"]
    # Everything that takes long is kept for another target.
    table = invoke(reduce, place / "SST-2", *options, "--out", place / "small", "--replace")
    assert "times faster at 16 tokens" in table
    assert "Before any fine-tuning" in table
    tuning = ("--data-dir", place, "--epochs", 1, "--max-length", 32, "--teacher", place / "SST-2")
    invoke(finetune, "SST-2", "--model", place / "small", *tuning, "--out", place / "tuned")
    # The second plan may be another one: the rest of the model, which is no layer, is timed anew.
    small = find(place / "small")
    tuned = find(place / "tuned" / "SST-2")
    assert tuned.transformer.config == small.transformer.config
    # Training keeps the shape, and so the speed that names the tier.
    assert tuned.config.speedup == small.config.speedup
    assert small.config.speedup.tokens == 16


def test_too_few_examples_are_refused_before_anything_is_timed(place, tmp_path):
    with pytest.raises(ReductionError, match=r"calibration set: got \d+ tokens .*expected more than 64"):
        invoke(reduce, place / "SST-2", "--calibration", 2, "--out", tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_a_resumed_reduction_says_so_and_prints_lines_when_piped(place, monkeypatch):
    monkeypatch.setattr(output, "LINE_SECONDS", 0.05)
    options = ("--calibration", 200, "--tokens", 8, "--target-speedup", 1.05, "--out", place / "other")
    result = CliRunner().invoke(reduce, [str(place / "SST-2"), *map(str, options)], catch_exceptions=False)
    lines = result.stderr.splitlines()
    assert f"other: resumes from the timings and layers in {place / '.SST-2.reduction'}" in lines
    seen = [line for line in lines if re.fullmatch(r"timing each option: \d+ of \d+, 0:00:\d\d", line)]
    assert len(set(seen)) > 2


def test_the_data_are_those_of_the_run_unless_they_are_gone(place, tmp_path):
    run = shutil.copytree(place / "SST-2", tmp_path / "SST-2")
    config = json.loads((run / CONFIG).read_text())
    assert config["data_dir"] == str(place.resolve())
    (run / CONFIG).write_text(json.dumps(config | {"data_dir": str(tmp_path / "gone")}))
    with pytest.raises(DataError, match=r"gone: got nothing there, .*trained with\. Give --data-dir"):
        invoke(reduce, run, "--out", tmp_path / "new")


def test_a_model_without_a_task_is_refused(place, tmp_path):
    with pytest.raises(UsageError, match=r"got a model without a task, expected a run on one of SST-2"):
        invoke(reduce, place / "model", "--data-dir", place, "--out", tmp_path / "new")
