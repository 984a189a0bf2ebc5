import json
import math

import msgspec
import pytest

from edge.bundles.bundle import Bundle
from edge.bundles.manifest import PredictedLatency
from edge.errors import UsageError
from export.cli.export import export
from export.cli.train import train
from export.training.runs import RunMetrics, read_config
from tests.support.task_data import invoke


def test_tables(runs, tmp_path):
    shown = invoke(train, "calculator-fnn2", "--epochs", 1, "--out", tmp_path)
    measures = json.loads((tmp_path / "calculator-fnn2/metrics.json").read_text())["measures"]
    score, papers = (f"{one['value']:.4g}" for one in measures if one["split"] == "benchmark")
    scores = f"Score: {score}; 1 is the baseline. By the paper's formula: {papers}, where the paper prints 6.635."
    for text in ("6,211 parameters", "2.23", scores, "from a slip in its code"):
        assert text in " ".join(shown.split())
    shown = invoke(export, runs / "calculator-gate", "--repository", tmp_path, "--no-measure")
    assert "largest difference to torch" in " ".join(shown.split())
    manifest, recorded = Bundle.open(tmp_path / "calculator-gate-1").manifest, runs / "calculator-gate" / "metrics.json"
    assert manifest.measures == msgspec.json.decode(recorded.read_bytes(), type=RunMetrics).measures
    assert {type(one) for one in manifest.tiers[0].latencies} == {PredictedLatency}


def test_several_seeds_give_means_with_intervals(tmp_path):
    arguments = ("calculator-gate", "--seed", 4, "--seeds", 2, "--epochs", 2, "--out", tmp_path, "--json")
    (result,) = json.loads(invoke(train, *arguments))
    places = [tmp_path / f"calculator-gate-seed{seed}" for seed in (4, 5)]
    assert result["runs"] == list(map(str, places))
    assert [read_config(place).provenance.seed for place in places] == [4, 5]
    single = [json.loads((place / "metrics.json").read_text()) for place in places]
    assert [metrics["epochs"] for metrics in single] == [2, 2]
    pooled, one, other = (metrics["measures"][0] for metrics in (result["metrics"], *single))
    assert one["value"] != other["value"]
    assert pooled["value"] == pytest.approx((one["value"] + other["value"]) / 2)
    # Student's t of one degree of freedom is 12.7062.
    of_seeds = 12.7062 * abs(one["value"] - other["value"]) / 2
    of_items = sum(each["interval"][1] - each["value"] for each in (one, other)) / 2
    assert pooled["interval"][1] - pooled["value"] == pytest.approx(math.hypot(of_seeds, of_items), rel=1e-4)
    assert (pooled["seeds"], pooled["n"]) == (2, one["n"])


def test_unknown_models_and_devices_are_rejected():
    for name, options, message in (
        ("calculator-blstm", (), r"MODEL: got 'calculator-blstm', .* Did you mean 'calculator-bilstm'\?"),
        ("bert", (), "Take 'calculator' for all"),
        ("calculator-stack", ("--device", "cuda"), "--device: got 'cuda', expected cpu for calculator-stack"),
    ):
        with pytest.raises(UsageError, match=message):
            invoke(train, name, *options)


def test_a_calculator_has_the_name_of_its_model_and_one_tier(runs, tmp_path):
    run = runs / "calculator-gate"
    for options, message in (
        ((run, "--name", "sum"), r"--name: got 'sum', .*its bundle is named calculator-gate"),
        ((run, "--tier-name", "x"), "--tier-name: got 'x', expected nothing: calculator-gate has one tier"),
        ((run, "--artifacts", "tensorrt"), "--artifacts: got 'tensorrt', expected nothing: calculator-gate has one f"),
        ((run, run), r"calculator-gate-1: got a second run of this model"),
    ):
        with pytest.raises(UsageError, match=message):
            invoke(export, *options, "--repository", tmp_path)
    assert not list(tmp_path.iterdir())
