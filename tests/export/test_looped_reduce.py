import json
import re

import msgspec
import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import numpy_helper

from edge.bundles.bundle import Bundle
from edge.datatypes import Array
from edge.errors import GoldenError
from edge.programs.loop import Loop, LoopRunners
from edge.programs.program import LoopLimits, Options
from edge.runtimes.build import load_runner
from export.commands.export import export
from export.commands.reduce import reduce
from export.models.convert import largest_difference
from export.papers.looped import MODEL, precisions
from export.papers.looped.functions import draw_prompts
from export.papers.looped.model import PromptTransformer
from export.papers.looped.objective import PromptObjective, Teacher
from export.papers.looped.recipes import Plan, plan_of, tuning_plan
from export.papers.looped.reduce import Smaller, layer_inputs, reduce_model
from export.papers.looped.seeds import EVALUATION, generator_of
from export.papers.looped.solvers import Trajectory, stopped, trajectory
from export.papers.looped.tier import MAX_LOOPS, TOLERANCE
from export.papers.looped.train import Start, create, train_run
from export.training.checkpoint import load
from export.training.trainer import train as train_objective


def invoke(command, *arguments):
    result = CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def make_model(injection="add"):
    """Return a model whose state settles slowly, as training makes it."""
    torch.manual_seed(0)
    model = PromptTransformer(plan_of("linear", "small", dim=16, injection=injection).config).eval()
    with torch.no_grad():
        for parameter in model.layers.parameters():
            if parameter.dim() > 1:
                parameter *= 4
    return model


def make_prompts(number=8, points=11):
    xs, ys = draw_prompts("linear", number, points, 5, torch.Generator().manual_seed(points))
    return xs, ys[:, :-1]


def test_heads_and_units_without_effect_leave_no_trace():
    model, prompts = make_model(), make_prompts()
    with torch.no_grad():
        layer = model.layers[0]
        layer.attention.output_proj.weight[:, 4:8] = 0  # of the second head of 4
        layer.feed_forward.down.weight[:, ::2] = 0
    small, (report,) = reduce_model(model, "linear", Smaller(heads=3, units=32))
    assert report.plan.heads == (0, 2, 3)
    assert report.plan.neurons == tuple(range(1, 64, 2))
    wanted, found = (trajectory(one, *prompts, 12) for one in (model, small))
    # The least squares have a ridge, so that the others change a little.
    assert np.abs(found.predictions - wanted.predictions).max() < 0.02 * wanted.predictions.std()


def test_the_calibration_reads_what_the_layer_reads_in_every_loop():
    model, read = make_model(), []
    model.layers[0].register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    states = layer_inputs(model, "linear")
    assert len(states) == 30
    assert not torch.allclose(states[0], states[1])
    torch.testing.assert_close(states, read, rtol=0, atol=0)


@pytest.mark.parametrize("injection", ["add", "multiply", "gated", "none"])
def test_every_injection_trains(injection):
    model = make_model(injection)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    (stage,) = tuning_plan("linear", model.config, 3).stages
    objective = PromptObjective(model, "linear", stage.curriculum, seed=0, batch_size=4, steps_per_epoch=3)
    train_objective(objective, stage.recipe, seed=0)
    still = {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}
    assert still <= ({"read_in.weight", "read_in.bias"} if injection == "none" else set())


def test_a_learner_is_compared_with_its_teacher_after_as_many_loops():
    model, teacher = make_model().train(), make_model()
    with torch.no_grad():
        teacher.read_out.bias += 1
    curriculum = tuning_plan("linear", model.config, 3).stages[0].curriculum
    assert (curriculum.loops.end, curriculum.drawn_loops, curriculum.window) == (30, 8, 8)
    taught, alone = (
        PromptObjective(model, "linear", curriculum, seed=0, batch_size=4, steps_per_epoch=3, teacher=one)
        for one in (Teacher(teacher, 0.75), None)
    )
    batch = next(taught.batches(0, 0))._replace(loops=10)
    xs, ys = batch.prompts
    learnt, wanted = (torch.stack(one(xs, ys, 10, 8)) for one in (model, teacher))
    expected = 0.25 * (learnt - ys).square().mean() + 0.75 * (learnt - wanted).square().mean()
    assert taught.loss(batch, 0.0).item() == pytest.approx(float(expected.detach()), rel=1e-5)
    assert taught.fingerprint() != alone.fingerprint()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a model that was not trained."""
    place, model = tmp_path_factory.mktemp("runs") / "dense", make_model()
    train_run("linear", Plan(model.config, ()), place, seed=0, start=Start(model, "made"))
    return place


@pytest.fixture(scope="module")
def lean(run):
    out = run.with_name("lean")
    sizes = ("--heads", 3, "--head-dim", 2, "--units", 32, "--steps", 2)
    made = invoke(reduce, run, *sizes, "--device", "cpu", "--out", out, "--json")
    assert made["layers"][0]["plan"]["shape"] | {"scale": None} == {
        "num_heads": 3,
        "head_dim": 2,
        "ffn_dim": 32,
        "scale": None,
    }
    assert made["step"]["ratio"] > 0.5
    assert [measure["split"] for measure in made["untrained"]] == ["loops-8", "loops-12", "loops-30", "loops-120"]
    assert made["metrics"]["epochs"] == 1
    _, config, _ = load(out, {MODEL: create})
    assert config.speedup.ratio == made["step"]["ratio"]
    assert config.provenance.trainer.startswith("reduced from dense to 3 heads of 2 and 32 units; tune: ")
    return out


def test_a_run_and_its_reduction_are_tiers_of_one_bundle(run, lean, tmp_path):
    invoke(export, run, lean, "--tier-name", "full", "--tier-name", "lean", "--repository", tmp_path, "--json")
    bundle = Bundle.open(tmp_path / "looped-linear-1")
    assert [tier.name for tier in bundle.manifest.tiers] == ["full", "lean"]
    assert {measure.split for measure in bundle.manifest.measures} >= {"loops-30, tier full", "loops-30, tier lean"}
    xs, ys = make_prompts(points=7)
    inputs: dict[str, Array] = {"xs": xs.numpy(), "ys": ys.numpy()}
    for tier, source in (("full", run), ("lean", lean)):
        model = load(source, {MODEL: create})[0]
        embed, step = (
            load_runner(bundle, "onnxruntime", tmp_path / "cache", tier=tier, role=role).runner
            for role in ("embed", "step")
        )
        loop = Loop(bundle.manifest.program, {tier: LoopRunners(embed, step)})
        found = loop.compute(inputs, Options(tier, LoopLimits(5, 1e-9))).outputs
        path = trajectory(model, xs, ys, 5)
        np.testing.assert_allclose(found["prediction"][:, 0], path.predictions[-1], rtol=1e-3, atol=1e-4)
        for runner in (embed, step):
            runner.close()


def test_tolerances_of_every_precision_notice_a_broken_file(lean, tmp_path):
    # Of an untrained model, INT8 loses nothing.
    invoke(export, lean, "--int8", "--repository", tmp_path, "--json")
    bundle = Bundle.open(tmp_path / "looped-linear-1")
    steps = {artifact.file: artifact for tier in bundle.manifest.tiers for artifact in tier.artifacts}
    assert [tier.name for tier in bundle.manifest.tiers] == ["x1", "x1-int8"]
    assert sorted((one.runtime, one.precision) for one in steps.values() if one.role == "step") == [
        ("onnxruntime", "fp32"),
        ("onnxruntime", "int8"),
        ("tensorrt", "fp16"),
        ("tensorrt", "int8"),
    ]
    for tier in bundle.manifest.tiers:
        for artifact in tier.artifacts:
            data, golden = (bundle.path / artifact.file).read_bytes(), bundle.golden_of(tier, artifact)
            largest_difference(data, golden, artifact.tolerance, artifact.file)
            with pytest.raises(GoldenError):
                largest_difference(broken(data), golden, artifact.tolerance, artifact.file)


def test_int8_is_refused_where_its_loops_are_worse(lean, tmp_path, monkeypatch):
    monkeypatch.setattr("export.papers.looped.tier._LARGEST_INT8_LOSS", 0.5)
    arguments = [str(lean), "--int8", "--repository", str(tmp_path)]
    result = CliRunner().invoke(export, arguments)
    message = r"error of tier x1 in INT8 for onnxruntime: got [\d.]+, expected [\d.]+ at most, 0.5 times that in FP32. "
    assert re.search(message + "Leave --int8 out.", str(result.exception))
    assert not list(tmp_path.iterdir())


def broken(data):
    """Return a model whose largest matrix has its rows in reverse order."""
    model = onnx.load_from_string(data)
    matrix = max((one for one in model.graph.initializer if len(one.dims) == 2), key=lambda one: np.prod(one.dims))
    matrix.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(matrix)[::-1].copy(), matrix.name))
    return model.SerializeToString()


def test_a_step_computes_its_residual_in_fp32(lean, tmp_path):
    invoke(export, lean, "--repository", tmp_path, "--json")
    model = onnx.load(tmp_path / "looped-linear-1" / "x1.step.tensorrt.fp16.onnx")
    made = {name: node for node in model.graph.node for name in node.output}
    assert made["residual"].op_type == "Sqrt"  # no cast follows
    assert made[made["residual"].input[0]].op_type == "Div"
    floats = {onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT}
    weights = {one.name: one.data_type for one in model.graph.initializer if one.data_type in floats}
    head = {kind for name, kind in weights.items() if name.startswith("head.")}
    others = {kind for name, kind in weights.items() if not name.startswith("head.")}
    assert (head, others) == ({onnx.TensorProto.FLOAT}, {onnx.TensorProto.FLOAT16})
    assert "head.model.read_out.bias" in weights


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--heads", 5), "--heads: got 5, expected 4 at most"),
        (
            ("--steps", 3),
            "--heads, --head-dim and --units: got the run's own sizes, expected fewer than 4 heads of 4 and 64 units. "
            "Give a smaller number for one of them.",
        ),
        (("--heads", 2, "--target-speedup", 2), "--target-speedup: got 2.0, expected a run that is not looped"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(run, options, message, tmp_path):
    result = CliRunner().invoke(reduce, [str(run), *map(str, options), "--out", str(tmp_path / "out")])
    assert message in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_options_of_looped_runs_are_refused_elsewhere(tmp_path):
    result = CliRunner().invoke(reduce, [str(tmp_path), "--heads", "2", "--out", str(tmp_path / "out")])
    assert "--heads: got 2, expected a run of a looped model" in str(result.exception)


def test_sizes_and_precisions_are_measured_side_by_side(run, lean, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(precisions, "PROMPTS", 32)
    monkeypatch.setattr(precisions, "BATCHES", {1: 3, 4: 3})
    record = tmp_path / "precisions.json"
    monkeypatch.setattr("sys.argv", ["precisions", str(run), str(lean), "--out", str(record)])
    precisions.main()
    table = capsys.readouterr().out
    found = msgspec.json.decode(record.read_bytes(), type=precisions.Record)
    named = ("fp32 for onnxruntime", "fp16 for tensorrt", "int8 for onnxruntime", "int8 for tensorrt")
    assert [(one.run, one.precision) for one in found.measured] == [
        (name, precision) for name in ("dense", "lean") for precision in named
    ]
    assert all(set(one.ratios) == set(one.milliseconds) == {1, 4} for one in found.measured)
    for source, one in ((run, found.measured[0]), (lean, found.measured[4])):
        model = load(source, {MODEL: create})[0]
        xs, ys = draw_prompts("linear", 32, model.config.points, model.config.dims, generator_of(EVALUATION))
        path = trajectory(model, xs, ys[:, :-1], 120)
        for loops, (error, low, high) in one.errors.items():
            expected = ((path.predictions[loops - 1] - ys[:, -1].numpy()) ** 2).mean() / model.config.dims
            assert low <= error <= high
            assert error == pytest.approx(expected, rel=1e-3)
        budget = Trajectory(path.predictions[:MAX_LOOPS], path.residuals[:MAX_LOOPS])
        assert one.loops == pytest.approx(stopped(budget, TOLERANCE).loops.mean(), abs=0.1)
        assert one.never == pytest.approx((budget.residuals > TOLERANCE).all(axis=0).mean(), abs=0.04)
    monkeypatch.setattr(precisions, "BATCHES", {2: 3})  # the table is that of the record
    monkeypatch.setattr("sys.argv", ["precisions", "--table", str(record)])
    precisions.main()
    assert capsys.readouterr().out == table
    unlooped = tmp_path / "unlooped"
    model = make_model(injection=None)
    train_run("linear", Plan(model.config, ()), unlooped, seed=0, start=Start(model, "made"))
    for wrong, message in (
        ([str(unlooped)], f"RUN {unlooped}: got an unlooped model, expected a looped one. Leave it out."),
        (["--table", str(run)], f"--table {run}: got "),
        ([], "give runs and perhaps --out, or --table alone"),
        (["--table", str(record), "--out", str(record)], "or --table alone"),
        ([str(run), str(run)], "got a second run of the name dense, expected runs of linear, d = 5, 11 points, D = "),
    ):
        monkeypatch.setattr("sys.argv", ["precisions", *wrong])
        with pytest.raises(SystemExit):
            precisions.main()
        assert message in capsys.readouterr().err
