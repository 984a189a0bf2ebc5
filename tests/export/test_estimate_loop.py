"""``fewheads estimate`` on a looped model: the sum of its files."""

import json

import pytest

from edge.bundles.bundle import Bundle
from edge.errors import UsageError
from edge.programs.tier_program import golden_loops, load_tier
from export.estimate.cli import estimate
from export.looped.bundle import export_looped
from export.looped.recipes import plan_of
from export.looped.train import train_run
from tests.support.task_data import invoke


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    place = tmp_path_factory.mktemp("looped")
    train_run("linear", plan_of("linear", "small", dim=8, steps=1), place / "run", seed=0)
    return Bundle.open(export_looped([place / "run"], place).bundle)


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


def test_options_of_other_models_are_refused(bundle):
    with pytest.raises(UsageError, match=r"--lengths: got \(8,\), expected none for looped-linear, which is looped"):
        invoke(estimate, bundle.path, "--lengths", "8")
