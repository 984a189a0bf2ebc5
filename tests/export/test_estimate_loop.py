"""``fewheads estimate`` on a looped model: the sum of its files."""

import json
import sys

import pytest
from msgspec.structs import replace

from edge.bundles.bundle import Bundle
from edge.bundles.rules import check
from edge.errors import BundleError, UsageError
from edge.programs.tier_program import golden_loops, load_tier
from export.bundle.exportable import export_bundle
from export.cli.estimate import estimate
from export.cli.export import export
from export.estimate.devices import DEFAULT_BOARD
from export.estimate.estimate import estimate_bundle
from export.papers.looped.bundle import LoopedRuns
from export.papers.looped.recipes import training_plan
from export.papers.looped.train import train_run
from tests.support.commands import shown
from tests.support.task_data import invoke


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    place = tmp_path_factory.mktemp("looped")
    train_run("linear", training_plan("linear", "small", dim=8, steps=1), place / "run", seed=0)
    return Bundle.open(export_bundle(LoopedRuns([place / "run"]), place).bundle)


def test_a_request_is_an_embedding_and_its_loops(bundle, tmp_path):
    program = load_tier(bundle, "onnxruntime", tmp_path)
    mean = golden_loops(program)
    program.close()
    for options, loops in (((), mean), (("--loops", 5), 5)):
        rows = json.loads(invoke(estimate, bundle.path, "--batch", "1,8", *options, "--json"))["rows"]
        assert [(row["part"], row["rows"]) for row in rows] == [
            (part, batch) for batch in (1, 8) for part in ("embed", "step", f"{loops:.3g} loops")
        ]
        for embed, step, whole in (rows[:3], rows[3:]):
            assert whole["loops"] == loops
            for key in ("milliseconds", "launch_ms", "gflop"):
                embed_part, step_part, whole_part = (row["prediction"][key] for row in (embed, step, whole))
                assert whole_part == pytest.approx(embed_part + loops * step_part)
            assert 0 < embed["prediction"]["gflop"] < step["prediction"]["gflop"]
        assert rows[4]["prediction"]["gflop"] == pytest.approx(8 * rows[1]["prediction"]["gflop"])
    assert "the mean of the golden prompts" in invoke(estimate, bundle.path)


def test_the_manifest_has_the_predictions_of_estimate(bundle, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)  # so that nobody counts the kernels of an engine
    rows = estimate_bundle(bundle.path, *DEFAULT_BOARD, batches=(1, 8)).rows
    found = bundle.manifest.tiers[0].latencies
    assert [(one.part, one.rows, one.tokens, one.milliseconds, one.high_ms) for one in found] == [
        (row.part, row.rows, row.tokens, row.milliseconds, row.prediction.high_ms) for row in rows
    ]
    assert len(found) == 6
    assert {one.precision for one in found} == {"fp16"}
    lines = shown("info", bundle.path).splitlines()
    for one in found:
        assert any(f" {one.part} " in line and "prediction" in line for line in lines), one
    tier, nameless = bundle.manifest.tiers[0], replace(found[0], part=None)
    with pytest.raises(BundleError, match="latency part: got none, expected the part of a request, which has several"):
        check(replace(bundle.manifest, tiers=(replace(tier, latencies=(nameless,)),)), "manifest")


def test_a_bundle_carries_the_files_of_chosen_runtimes(bundle, tmp_path):
    options = ("--artifacts", "onnxruntime", "--no-measure", "--json")
    (made,) = json.loads(invoke(export, bundle.path.parent / "run", "--repository", tmp_path, *options))
    (tier,) = Bundle.open(made["bundle"]).manifest.tiers
    assert [(one.role, one.runtime) for one in tier.artifacts] == [("embed", "any"), ("step", "onnxruntime")]
    assert tier.latencies == ()


def test_options_of_other_models_are_refused(bundle):
    with pytest.raises(UsageError, match=r"--lengths: got \(8,\), expected none for looped-linear, which is looped"):
        invoke(estimate, bundle.path, "--lengths", "8")
