import numpy as np
import onnx
import pytest

from edge.bundles.bundle import Bundle
from edge.bundles.expression import tokenize
from edge.bundles.golden import check_runner
from edge.errors import BundleError
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.calculator.bundle import export_run
from export.calculator.models import MODELS
from export.checkpoint import load


@pytest.fixture(scope="module")
def bundles(runs, tmp_path_factory):
    repository = tmp_path_factory.mktemp("repository")
    for run in (*(runs / name for name in MODELS if "transformer" not in name), runs / "fixed/calculator-transformer4"):
        export_run(run, repository)
    return repository


@pytest.mark.parametrize("name", MODELS)
def test_the_bundle_passes_its_golden_check_and_describes_its_file(name, bundles):
    bundle = Bundle.open(bundles / f"{name}-1")
    manifest, artifact = bundle.manifest, bundle.artifact("tensorrt")
    assert artifact == bundle.artifact("onnxruntime")
    runner = OnnxRuntimeRunner((bundle.path / artifact.file).read_bytes(), subject=name)
    assert check_runner(runner, bundle.golden, artifact.tolerance, name, manifest.max_batch_size).passed
    assert (runner.inputs, runner.outputs) == (manifest.inputs, manifest.outputs)
    assert onnx.load(bundle.path / "model.onnx").opset_import[0].version == artifact.opset
    assert (manifest.name, manifest.version, manifest.max_batch_size) == (name, 1, 256)
    assert [tier.name for tier in manifest.tiers] == ["x1"]
    assert set(manifest.files) == {"model.onnx", "golden.npz"}
    oracle = name == "calculator-oracle"
    assert (manifest.preprocess.max_abs_operand, manifest.provenance.seed) == ((1024, None) if oracle else (1e6, 0))
    adaptive = {"head_score", "kept_coordinates"} <= {measure.metric for measure in manifest.measures}
    assert adaptive is ("transformer" in name)


def test_the_golden_set_comes_from_torch_and_from_all_splits(bundles, runs, splits):
    golden = Bundle.open(bundles / "calculator-gate-1").golden
    texts = [text.decode() for text in golden.raw["expression"][:, 0]]
    assert golden.rows == len(texts) == 48
    for name in ("val", "in_range", "out_of_range", "long"):
        assert len({*texts} & {*splits[name].expressions}) >= 12
    np.testing.assert_array_equal(golden.inputs["x"], tokenize(texts))
    model, _, _ = load(runs / "calculator-gate", MODELS)
    np.testing.assert_array_equal(golden.outputs["value"], model.predict(golden.inputs["x"]))


def test_measures_are_of_the_exported_graph(bundles, runs):
    manifest = Bundle.open(bundles / "calculator-fnn2-1").manifest
    metrics = load(runs / "calculator-fnn2", MODELS)[2]
    trained = {(m.metric, m.split): m.value for m in metrics.measures}
    assert {(m.metric, m.split): m.value for m in manifest.measures} == pytest.approx(trained, rel=1e-4)
    assert manifest.measures != metrics.measures


def test_a_bundle_is_replaced_only_on_request(bundles, runs):
    with pytest.raises(BundleError, match="expected a free path"):
        export_run(runs / "calculator-oracle", bundles)
    assert export_run(runs / "calculator-oracle", bundles, replace=True).largest_difference == 0.0
