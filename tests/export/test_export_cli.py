import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from edge.bundles.bundle import Bundle
from edge.errors import UsageError
from export.calculator import NAMES
from export.calculator.models import MODELS
from export.cli import export, train
from export.errors import CheckpointError


def invoke(command, *arguments):
    """Run a command in this process; errors that are not click's are raised."""
    return CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)


def fewheads(*arguments):
    """Run the installed program, warnings as errors."""
    command = [sys.executable, "-W", "error", "-m", "edge", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_names_are_the_models():
    assert tuple(MODELS) == NAMES


def test_train_and_export(tmp_path):
    done = fewheads("train", "calculator-oracle", "--out", tmp_path / "runs", "--json")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    assert result["model"] == "calculator-oracle"
    assert result["metrics"]["parameters"] == 511
    assert {m["value"] for m in result["metrics"]["measures"] if m["metric"] == "mae"} == {0.0}

    done = fewheads("export", *result["runs"], "--repository", tmp_path / "models", "--json")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    assert result["largest_difference"] == 0.0
    assert Bundle.open(result["bundle"]).manifest.name == "calculator-oracle"


def test_table_shows_the_papers_figures(tmp_path):
    result = invoke(train, "calculator-fnn2", "--epochs", 1, "--out", tmp_path)
    assert result.exit_code == 0
    assert "6,211 parameters" in result.stdout
    assert "2.23" in result.stdout
    assert "from a slip in its code" in result.stdout


def test_several_seeds_give_means_with_intervals(tmp_path):
    arguments = ("calculator-gate", "--seed", 4, "--seeds", 2, "--epochs", 2, "--out", tmp_path, "--json")
    (result,) = json.loads(invoke(train, *arguments).stdout)
    assert result["runs"] == [str(tmp_path / f"calculator-gate-seed{seed}") for seed in (4, 5)]
    single = [json.loads((tmp_path / f"calculator-gate-seed{seed}" / "metrics.json").read_text()) for seed in (4, 5)]
    pooled, one, other = (metrics["measures"][0] for metrics in (result["metrics"], *single))
    assert one["value"] != other["value"]
    assert pooled["value"] == pytest.approx((one["value"] + other["value"]) / 2)
    # Student's t of one degree of freedom is 12.7062.
    half_width = 12.7062 * abs(one["value"] - other["value"]) / 2
    assert pooled["interval"][1] - pooled["value"] == pytest.approx(half_width, rel=1e-4)
    assert (pooled["seeds"], pooled["n"]) == (2, one["n"])


def test_seed_and_epochs_reach_the_run(tmp_path):
    result = invoke(train, "calculator-gate", "--seed", 3, "--epochs", 2, "--out", tmp_path, "--json")
    assert json.loads(result.stdout)[0]["metrics"]["epochs"] == 2
    config = json.loads((tmp_path / "calculator-gate" / "config.json").read_text())
    assert config["provenance"]["seed"] == 3


@pytest.mark.parametrize(
    ("options", "arguments"),
    [([], {"adaptive": "fixed"}), (["--loss", "literal"], {"adaptive": "literal"}), (["--loss", "none"], {})],
)
def test_loss(options, arguments, tmp_path):
    invoke(train, "calculator-transformer4", "--epochs", 1, "--out", tmp_path, *options)
    config = json.loads((tmp_path / "calculator-transformer4" / "config.json").read_text())
    assert config["arguments"] == arguments


def test_export_table(runs, tmp_path):
    result = invoke(export, runs / "calculator-gate", "--repository", tmp_path)
    assert "largest difference to torch" in " ".join(result.stdout.split())
    assert (tmp_path / "calculator-gate-1" / "manifest.json").exists()


def test_wrong_model():
    with pytest.raises(UsageError, match=r"MODEL: got 'calculator-fnn3', .* Did you mean 'calculator-fnn2'\?"):
        invoke(train, "calculator-fnn3")
    with pytest.raises(UsageError, match="Take 'calculator' for all"):
        invoke(train, "bert")


def test_loss_without_a_model_for_it():
    with pytest.raises(UsageError, match="--loss: got 'literal', expected calculator-transformer4 among the models"):
        invoke(train, "calculator-gate", "--loss", "literal")


def test_a_calculator_has_the_name_of_its_model_and_one_tier(runs, tmp_path):
    run = runs / "calculator-gate"
    with pytest.raises(UsageError, match=r"--name: got 'sum', .*the bundle of a calculator is named calculator-gate"):
        invoke(export, run, "--repository", tmp_path, "--name", "sum")
    with pytest.raises(UsageError, match="--tier-name: got 'x', expected no name: a calculator has one tier"):
        invoke(export, run, "--repository", tmp_path, "--tier-name", "x")
    with pytest.raises(UsageError, match=r"calculator-gate-1: got a second run of this model"):
        invoke(export, run, run, "--repository", tmp_path)
    assert not list(tmp_path.iterdir())


def test_export_of_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="got nothing there, expected a run directory"):
        invoke(export, tmp_path / "none", "--repository", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["train", "bert"], 2, "fewheads: MODEL: got 'bert'"),
        (["train"], 2, "Missing argument"),
        (["train", "calculator-gate", "--epochs", "0"], 2, "Invalid value for '--epochs'"),
        (["export", "missing", "--repository", "models"], 1, "fewheads: run missing: got nothing there"),
        (["export", "missing"], 2, "Missing option '--repository'"),
    ],
)
def test_mistakes_end_in_a_message(arguments, code, text):
    done = fewheads(*arguments)
    assert done.returncode == code
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_help_does_not_load_torch():
    code = "import sys, export.cli; sys.exit('torch' in sys.modules or 'onnx' in sys.modules or 'grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
