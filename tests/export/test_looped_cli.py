import json

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from click.testing import CliRunner

from edge.launch import running_server
from export.cli import export, train
from export.papers.looped import MODEL
from export.papers.looped.functions import draw_prompts
from export.papers.looped.recipes import plan_of
from export.papers.looped.solvers import trajectory
from export.papers.looped.train import create, train_run
from export.training.checkpoint import load
from export.training.provenance import processor
from tests.support.sample_requests import triton_input
from tests.support.task_data import Seen


def invoke(command, *arguments):
    result = CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    (made,) = invoke(train, "looped-linear", "--dim", 16, "--steps", 3, "--out", place, "--json")
    measured = {measure["split"]: measure for measure in made["metrics"]["measures"]}
    assert list(measured) == ["loops-8", "loops-12", "loops-30", "loops-120"]
    assert all(measure["n"] == 1280 and measure["interval"] for measure in measured.values())
    return place / "looped-linear"


def test_a_run_is_served_and_computes_the_same_loops(run, tmp_path):
    (made,) = invoke(export, run, "--repository", tmp_path, "--json")
    for one in made["files"]:
        assert one["largest_difference"] < (0.01 if ".fp16." in one["file"] else 1e-4)
    model, limits = load(run, {MODEL: create})[0], {"max_loops": 5, "tolerance": 1e-9}
    with (
        running_server([tmp_path / "looped-linear-1"], target="onnxruntime", cache=tmp_path / "cache") as ready,
        triton.InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client,
    ):
        for points in (2, 7, 11):  # prompts of any length up to the trained one
            xs, ys = draw_prompts("linear", 3, points, 5, torch.Generator().manual_seed(points))
            inputs = [triton_input("xs", xs.numpy()), triton_input("ys", ys[:, :-1].numpy())]
            found = client.infer("looped-linear", inputs, parameters=limits)
            path = trajectory(model, xs, ys[:, :-1], 5)
            np.testing.assert_allclose(found.as_numpy("prediction")[:, 0], path.predictions[-1], rtol=1e-3, atol=1e-5)
            np.testing.assert_allclose(found.as_numpy("residual")[:, 0], path.residuals[-1], rtol=1e-3, atol=1e-6)
            assert found.as_numpy("loops").tolist() == [[5]] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("looped-linear", "--dim", 18), "--dim: got 18, expected a multiple of the 4 heads. Give --dim 16."),
        (
            ("looped-linear", "--unlooped", "--injection", "add"),
            "--injection: got 'add', expected no --injection with --unlooped",
        ),
        (("looped-linear", "--epochs", 3), "--epochs: got 3, expected a calculator among the models. Give --steps."),
        (("calculator-gate", "--steps", 3), "--steps: got 3, expected a model of looped-linear, looped-sparse"),
        (("looped-linear", "--stages", 3), "--stages: got 3, expected at most 2, the stages of this plan"),
        (("looped-line",), "Did you mean 'looped-linear'?"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, message, tmp_path):
    result = CliRunner().invoke(train, [*map(str, arguments), "--out", str(tmp_path)])
    assert message in str(result.exception)


def test_an_unlooped_model_is_trained_in_bf16_and_not_served(tmp_path):
    shape = ("--unlooped", "--layers", 1, "--dim", 8)
    invoke(train, "looped-linear", *shape, "--precision", "bf16", "--steps", 1, "--out", tmp_path, "--json")
    features = processor().features
    precision = "bf16" if features is None or "BF16" in features else "fp32"
    assert load(tmp_path / "looped-linear", {MODEL: create})[1].precision == precision
    result = CliRunner().invoke(export, [str(tmp_path / "looped-linear"), "--repository", str(tmp_path / "models")])
    assert "got an unlooped model, expected a looped model" in str(result.exception)


def test_an_interrupted_training_resumes_in_its_stage(tmp_path):
    plan = plan_of("linear", "small", dim=8, steps=6)
    whole = train_run("linear", plan, tmp_path / "whole", seed=0)
    with pytest.raises(KeyboardInterrupt):
        train_run("linear", plan, tmp_path / "again", seed=0, observer=Seen(7))  # in the second stage
    seen = Seen()
    again = train_run("linear", plan, tmp_path / "again", seed=0, observer=seen)
    assert seen.resumed == [(6, 6)]  # the first stage is not repeated
    assert (again.scores, again.losses, again.measures) == (whole.scores, whole.losses, whole.measures)
    log = [json.loads(line) for line in (tmp_path / "again" / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in log] == [1, 1]
    assert not list(tmp_path.glob(".*"))
