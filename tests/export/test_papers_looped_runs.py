"""Looped runs: training, bundles and their predicted latencies, and the engines of their graphs."""

import json
import sys
from contextlib import contextmanager
from functools import partial

import msgspec
import numpy as np
import onnx
import pytest
import torch
import tritonclient.grpc as triton
from click.testing import CliRunner
from msgspec.structs import replace
from onnx import numpy_helper

from edge.bundles.bundle import Bundle
from edge.bundles.manifest import Measure, Profile, Tolerance
from edge.bundles.rules import check
from edge.errors import BundleError, GoldenError, UsageError
from edge.launch import running_server
from edge.programs.tier_program import golden_loops, load_tier
from edge.runtimes.tensorrt.build import compile_onnx
from export.cli.estimate import estimate
from export.cli.export import export
from export.cli.reduce import reduce
from export.cli.train import train
from export.errors import CheckpointError
from export.estimate.devices import DEFAULT_BOARD
from export.estimate.estimate import estimate_bundle
from export.estimate.model import kernels
from export.estimate.operations import work_of
from export.models.convert import golden_of, largest_difference
from export.models.transformer import LayerShape
from export.papers.looped import MODEL, NAMES
from export.papers.looped.model import (
    EMBED_OUTPUTS,
    STEP_OUTPUTS,
    Embed,
    PromptTransformer,
    StepGraph,
    embed_onnx,
    step_onnx,
    trajectory,
    unlooped_onnx,
)
from export.papers.looped.options import LoopedOptions
from export.papers.looped.prompts import EVALUATION, GOLDEN, draw_prompts, generator_of, squared_errors
from export.papers.looped.recipes import training_plan
from export.papers.looped.tiers import usual_files
from export.papers.looped.train import load_run, train_run
from export.training.checkpoint import save
from export.training.provenance import processor, provenance
from export.training.runs import RunConfig, RunMetrics
from tests.support.commands import shown
from tests.support.marks import with_rtx
from tests.support.sample_requests import triton_input
from tests.support.task_data import Seen, invoke

ROWS = 8
compiled = partial(compile_onnx, flavor="tensorrt_rtx", compute_capability="SM86", subject="looped")


def make_model(*shapes, **options):
    """Return a model whose state settles slowly, as training makes it; without shapes, with the usual layer."""
    torch.manual_seed(0)
    config = training_plan("linear", LoopedOptions(dim=16, layers=1, **options)).config
    model = PromptTransformer(replace(config, shapes=shapes or config.shapes)).eval()
    with torch.no_grad():
        for parameter in model.layers.parameters():
            if parameter.dim() > 1:
                parameter *= 4
    return model


def make_prompts(points=11):
    xs, ys = draw_prompts("linear", 8, points, 5, torch.Generator().manual_seed(points))
    return xs, ys[:, :-1]


def check_answers(client, bundle, model, xs, ys, loops, **parameters):
    """Compare served predictions with torch's, and return them; an unlooped model takes no loops."""
    inputs = [triton_input("xs", xs.numpy()), triton_input("ys", ys.numpy())]
    limits = {"max_loops": loops, "tolerance": 1e-30} if model.config.injection else {}
    response = client.infer(bundle, inputs, parameters=parameters | limits)
    found = {one.name: response.as_numpy(one.name)[:, 0] for one in response.get_response().outputs}
    path = trajectory(model, xs, ys, loops)
    np.testing.assert_allclose(found["prediction"], path.predictions[-1], rtol=1e-3, atol=1e-4)
    if limits:
        np.testing.assert_allclose(found["residual"], path.residuals[-1], rtol=1e-3, atol=1e-4)
        assert set(found["loops"][found["residual"] > 0]) <= {loops}  # a state may no longer change at all
    assert len(found) == (3 if limits else 1)
    return found["prediction"]


@contextmanager
def serving(repository, cache):
    """Yield a stock client of a server with all bundles of a repository."""
    with (
        running_server(sorted(repository.iterdir()), target="onnxruntime", cache=cache) as ready,
        triton.InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client,
    ):
        yield client


def write_run(model, directory):
    """Write the run of a model that was not trained."""
    arguments = {"function": "linear", "config": msgspec.to_builtins(model.config)}
    measures = (Measure("squared_error", "loops-30" if model.config.injection else "unlooped", 0.5, 1280),)
    config = RunConfig(MODEL, arguments, provenance(trainer="made", data="none", seed=0))
    save(directory, model, config, RunMetrics(model.parameter_count, 0, 0, 0.0, measures))
    return directory


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(make_model(), tmp_path_factory.mktemp("runs") / "dense")


@pytest.fixture(scope="module")
def lean(run):
    return write_run(make_model(LayerShape(3, 2, 32)), run.with_name("lean"))


def test_tiers_of_bundles_compute_what_their_runs_do(run, lean, tmp_path):
    shapes = {"full": (), "lean": (LayerShape(3, 2, 32), LayerShape(3, 2, 32))}
    unlooped = [write_run(make_model(*of, unlooped=True), tmp_path / tier) for tier, of in shapes.items()]
    names = ("--tier-name", "full", "--tier-name", "lean", "--repository", tmp_path / "models", "--json")
    (looped_made,) = json.loads(invoke(export, run, lean, *names))
    (unlooped_made,) = json.loads(invoke(export, *unlooped, *names))
    for one in (*looped_made["files"], *unlooped_made["files"]):
        assert one["largest_difference"] < (0.01 if ".fp16." in one["file"] else 1e-4)
    runs = {"looped-linear": (run, lean), "unlooped-linear": unlooped}
    for name, split in zip(runs, ("loops-30", "unlooped"), strict=True):
        measures = Bundle.open(tmp_path / "models" / f"{name}-1").manifest.measures
        assert {measure.split for measure in measures} == {f"{split}, tier full", f"{split}, tier lean"}
    with serving(tmp_path / "models", tmp_path / "cache") as client:
        for name, sources in runs.items():
            for tier, source in zip(shapes, sources, strict=True):
                model = load_run(source)[0]
                for points in (2, 7, 11):  # prompts of any length up to the trained one
                    loops = 5 if model.config.injection else 1
                    check_answers(client, name, model, *make_prompts(points), loops, tier=tier)
        xs, ys = make_prompts()
        first = check_answers(client, "unlooped-linear", load_run(unlooped[0])[0], xs[:, :5], ys[:, :4], 1)
        for points, values in ((11, 4), (5, 5)):  # what follows the first point without a value changes nothing
            inputs = [triton_input("xs", xs[:, :points].numpy()), triton_input("ys", ys[:, :values].numpy())]
            found = client.infer("unlooped-linear", inputs).as_numpy("prediction")[:, 0]
            np.testing.assert_allclose(found, first, rtol=1e-4, atol=1e-5)
        with pytest.raises(
            triton.InferenceServerException, match="'max_loops' of 'unlooped-linear': got 5, expected none"
        ):
            client.infer("unlooped-linear", inputs, parameters={"max_loops": 5})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_of_all_functions_are_trained_exported_and_served_side_by_side(tmp_path):
    for kind, options in (("looped", ()), ("unlooped", ("--unlooped", "--layers", 2))):
        invoke(train, *NAMES, *options, "--dim", 8, "--steps", 20, "--out", tmp_path / kind, "--json")
    runs = sorted(tmp_path.glob("*looped/*"))
    assert len(runs) == 8
    invoke(export, *runs, "--repository", tmp_path / "models", "--no-measure")
    with serving(tmp_path / "models", tmp_path / "cache") as client:
        for source in runs:
            model, record, metrics = load_run(source)
            function, config, looped = record.arguments["function"], model.config, source.parent.name == "looped"
            xs, ys = draw_prompts(function, 1280, config.points, config.dims, generator_of(EVALUATION))
            found = [
                check_answers(client, f"{source.parent.name}-{function}", model, *rows, 8 if looped else 1)
                for rows in zip(xs.split(64), ys[:, :-1].split(64), strict=True)
            ]
            recorded = next(one.value for one in metrics.measures if one.split in ("loops-8", "unlooped"))
            errors = squared_errors(function, config.dims, np.concatenate(found), ys[:, -1].numpy())
            assert errors.mean() == pytest.approx(recorded, rel=1e-5)


@pytest.fixture(scope="module")
def bundle(lean):
    invoke(export, lean, "--repository", lean.parent)
    return Bundle.open(lean.with_name("looped-linear-1"))


def test_golden_prompts_are_the_first_that_settle(bundle, lean):
    model, (tier,) = load_run(lean)[0], bundle.manifest.tiers
    xs, ys = draw_prompts("linear", 64, model.config.points, model.config.dims, generator_of(GOLDEN))
    settled = trajectory(model, xs, ys[:, :-1], 32).residuals[-1] <= 0.05
    np.testing.assert_array_equal(bundle.golden_of(tier, tier.artifacts[0]).inputs["xs"], xs.numpy()[settled][:16])


def test_tolerances_of_every_precision_notice_a_broken_file_and_residuals_are_fp32(bundle):
    (tier,) = bundle.manifest.tiers
    steps = [one for one in tier.artifacts if one.role == "step"]
    assert [(one.runtime, one.precision) for one in steps] == [("onnxruntime", "fp32"), ("tensorrt", "fp16")]
    for artifact in tier.artifacts:
        data, golden = (bundle.path / artifact.file).read_bytes(), bundle.golden_of(tier, artifact)
        largest_difference(data, golden, artifact.tolerance, artifact.file)
        with pytest.raises(GoldenError):
            largest_difference(broken(data), golden, artifact.tolerance, artifact.file)
    model = onnx.load(bundle.path / "x1.step.tensorrt.fp16.onnx")
    made = {name: node for node in model.graph.node for name in node.output}
    assert made["residual"].op_type == "Sqrt"  # no cast follows
    assert made[made["residual"].input[0]].op_type == "Div"
    floats = {onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT}
    weights = {one.name: one.data_type for one in model.graph.initializer if one.data_type in floats}
    head = {kind for name, kind in weights.items() if name.startswith("head.")}
    others = {kind for name, kind in weights.items() if not name.startswith("head.")}
    assert (head, others) == ({onnx.TensorProto.FLOAT}, {onnx.TensorProto.FLOAT16})
    assert "head.model.read_out.bias" in weights


def broken(data):
    """Return a model whose largest matrix has its rows in reverse order."""
    model = onnx.load_from_string(data)
    matrix = max((one for one in model.graph.initializer if len(one.dims) == 2), key=lambda one: np.prod(one.dims))
    matrix.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(matrix)[::-1].copy(), matrix.name))
    return model.SerializeToString()


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
    with pytest.raises(UsageError, match=r"--lengths: got \(8,\), expected none for looped-linear, which is looped"):
        invoke(estimate, bundle.path, "--lengths", "8")


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


def test_a_bundle_carries_the_files_of_chosen_runtimes(lean, tmp_path):
    options = ("--artifacts", "onnxruntime", "--no-measure", "--json")
    (made,) = json.loads(invoke(export, lean, "--repository", tmp_path, *options))
    (tier,) = Bundle.open(made["bundle"]).manifest.tiers
    assert [(one.role, one.runtime) for one in tier.artifacts] == [("embed", "any"), ("step", "onnxruntime")]
    assert tier.latencies == ()


def test_a_looped_run_is_not_reduced(run, tmp_path):
    other = r"field model: got 'prompt-transformer', expected one of transformer-with-head\. Give a run of such a model"
    with pytest.raises(CheckpointError, match=other):
        invoke(reduce, run, "--out", tmp_path / "out")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("looped-linear", "--dim", 18), "--dim: got 18, expected a multiple of the 4 heads. Give --dim 16."),
        (("looped-linear", "--stages", 3), "--stages: got 3, expected at most 2, the stages of this plan"),
        (("looped-linear", "--unlooped", "--injection", "add"), "--injection: got 'add', expected no --injection wi"),
        (("looped-linear", "--epochs", 3), "--epochs: got 3, expected a calculator among the models. Give --steps."),
        (("calculator-gate", "--steps", 3), "--steps: got 3, expected a model of looped-linear, looped-sparse"),
        (("looped-line",), "Did you mean 'looped-linear'?"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, message, tmp_path):
    result = CliRunner().invoke(train, [*map(str, arguments), "--out", str(tmp_path)])
    assert message in str(result.exception)


def test_an_unlooped_model_is_trained_in_bf16(tmp_path):
    shape = ("--unlooped", "--layers", 1, "--dim", 8)
    invoke(train, "looped-linear", *shape, "--precision", "bf16", "--steps", 1, "--out", tmp_path, "--json")
    features = processor().features
    precision = "bf16" if features is None or "BF16" in features else "fp32"
    assert load_run(tmp_path / "looped-linear")[1].precision == precision


def test_an_interrupted_training_resumes_in_its_stage(tmp_path, monkeypatch):
    monkeypatch.setattr("export.papers.looped.train._PROMPTS", 64)
    plan = training_plan("linear", LoopedOptions(dim=8, steps=6))
    whole = train_run("linear", plan, tmp_path / "whole", seed=0)
    with pytest.raises(KeyboardInterrupt):
        train_run("linear", plan, tmp_path / "again", seed=0, observer=Seen(7))  # in the second stage
    seen = Seen()
    again = train_run("linear", plan, tmp_path / "again", seed=0, observer=seen)
    assert seen.resumed == [(6, 6)]  # the first stage is not repeated
    assert (again.scores, again.losses, again.measures) == (whole.scores, whole.losses, whole.measures)
    assert {one.split: (one.n, one.interval is not None) for one in whole.measures} == dict.fromkeys(
        ("loops-8", "loops-12", "loops-30", "loops-120"), (64, True)
    )
    log = [json.loads(line) for line in (tmp_path / "again" / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in log] == [1, 1]
    assert not list(tmp_path.glob(".*"))


def model_of(size, **options):
    torch.manual_seed(0)
    return PromptTransformer(training_plan("linear", LoopedOptions(size, **options)).config).eval()


def profile_of(inputs, least):
    return {
        name: Profile(min=(1, *least[name], *array.shape[2:]), opt=array.shape, max=(64, *array.shape[1:]))
        for name, array in inputs.items()
    }


def prompts_of(config):
    xs, ys = draw_prompts("linear", ROWS, config.points, config.dims, torch.Generator().manual_seed(1))
    return {"xs": xs.numpy(), "ys": ys[:, :-1].numpy()}


@with_rtx
def test_an_embedding_compiles():
    model = model_of("small")
    inputs = prompts_of(model.config)
    data, golden = embed_onnx(model), golden_of(Embed(model), inputs, EMBED_OUTPUTS)
    assert largest_difference(data, golden, Tolerance(atol=1e-5, rtol=1e-5), "embed") < 1e-5
    product = compiled(data, profile_of(inputs, {"xs": (2,), "ys": (1,)}))
    assert product.report.attention == "no attention"


@with_rtx
def test_attention_of_an_unlooped_model_is_fused_in_fp16():
    model = model_of("small", unlooped=True, layers=2)
    data = usual_files(unlooped_onnx(model))["tensorrt"][1]
    product = compiled(data, profile_of(prompts_of(model.config), {"xs": (2,), "ys": (1,)}))
    assert product.report.attention == "2 blocks, fused"
    assert not product.report.notes


@with_rtx
@pytest.mark.parametrize("size", ["small", "paper"])
def test_attention_of_a_step_is_fused_in_fp16_for_prompts_of_any_length(size):
    model = model_of(size)
    with torch.no_grad():
        prompt, state = Embed(model)(*map(torch.from_numpy, prompts_of(model.config).values()))
        for _ in range(4):
            state = model.step(state, prompt)
    inputs = {
        "state": state.numpy(), "prompt": prompt.numpy(), "last": np.full((ROWS, 1), prompt.shape[1] - 1, np.int64)
    }  # fmt: skip
    data, golden = step_onnx(model), golden_of(StepGraph(model), inputs, STEP_OUTPUTS)
    profile = profile_of(inputs, {"state": (3,), "prompt": (3,), "last": (1,)})
    profile["last"] = Profile(min=(1, 1), opt=(ROWS, 1), max=(64, 1))
    for graph, atol, attention in (
        (data, 1e-4, "1 block, not fused: FP32, and fusion needs FP16"),
        (usual_files(data)["tensorrt"][1], 0.02, "1 block, fused"),
    ):
        assert largest_difference(graph, golden, Tolerance(atol=atol, rtol=atol), "step") < atol
        product = compiled(graph, profile)
        assert product.report.attention == attention
        assert (b"_gemm_mha_v2" in product.data) == attention.endswith(", fused")
        assert not product.report.notes
    # There were 18: three copied queries, keys and values, and four read the prediction out.
    counted = kernels(graph, profile)
    assert len(counted) <= 11
    work = work_of(graph, {name: array.shape for name, array in inputs.items()}, "step")
    # Its structure, from which manifests are predicted; the engine reads prediction and residual out in two kernels.
    assert len(work.kernels) + work.others == len(counted) - 1
