from collections import Counter

import numpy as np
import onnx
import pytest

from edge.bundles.bundle import Bundle
from edge.bundles.expression import tokenize
from edge.bundles.golden import check_runner
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.papers.calculator.benchmark import evaluate
from export.papers.calculator.bundle import export_run
from export.papers.calculator.specs import SPECS
from tests.support.calculators import EACH, untrained

#: The layers that are one operator each.
OPERATORS = {"RNN": 2, "LSTM": 1, "GRU": 1}


@pytest.mark.parametrize("name", EACH)
def test_the_bundle_passes_its_golden_check_and_describes_its_file(name, calculator):
    bundle = Bundle.open(calculator(name))  # the export compares it with torch on all splits
    manifest, artifact, spec = bundle.manifest, bundle.artifact("tensorrt"), SPECS[name]
    assert artifact == bundle.artifact("onnxruntime")
    assert (artifact.precision, artifact.tolerance) == ("fp32", spec.tolerance)
    data = (bundle.path / artifact.file).read_bytes()
    runner = OnnxRuntimeRunner(data, subject=name)
    assert check_runner(runner, bundle.golden, artifact.tolerance, name, manifest.max_batch_size).passed
    assert (runner.inputs, runner.outputs) == (manifest.inputs, manifest.outputs)
    model = onnx.load_from_string(data)
    assert model.opset_import[0].version == artifact.opset
    found = Counter(node.op_type for node in model.graph.node)
    cell = "RNN" if spec.network == "Rnn" else spec.arguments.get("cell")
    assert {kind: found[kind] for kind in OPERATORS if found[kind]} == ({cell: OPERATORS[cell]} if cell else {})
    assert not set(found) & {"If", "Loop", "Scan", "NonZero", "SequenceAt"}
    assert (manifest.name, manifest.version, manifest.max_batch_size) == (name, 1, 256)
    assert ([tier.name for tier in manifest.tiers], set(manifest.files)) == (["x1"], {"model.onnx", "golden.npz"})
    assert manifest.preprocess.max_abs_operand == (1024 if name == "calculator-oracle" else 1e6)
    assert {measure.metric for measure in manifest.measures} == {"mae", "mre", "exact_match", "score", "paper_score"}


def test_the_golden_set_comes_from_torch_and_from_all_splits(calculator, splits):
    golden = Bundle.open(calculator("calculator-gate")).golden
    texts = [text.decode() for text in golden.raw["expression"][:, 0]]
    assert golden.rows == len(texts) == 48
    for name in ("val", "in_range", "out_of_range", "long"):
        assert len({*texts} & {*splits[name].expressions}) >= 12
    np.testing.assert_array_equal(golden.inputs["x"], tokenize(texts))
    np.testing.assert_array_equal(golden.outputs["value"], untrained("calculator-gate").predict(golden.inputs["x"]))


def test_measures_are_of_the_exported_graph(calculator, splits):
    measures = Bundle.open(calculator("calculator-rnn2")).manifest.measures
    torchs = evaluate(untrained("calculator-rnn2").predict, splits)
    assert {(m.metric, m.split): m.value for m in measures} == pytest.approx(
        {(m.metric, m.split): m.value for m in torchs}, rel=1e-4
    )
    assert measures != torchs


def test_the_use_of_adaptive_heads_is_among_the_measures(runs, tmp_path):
    exported = export_run(runs / "fixed" / "calculator-transformer4", tmp_path)
    measures = Bundle.open(exported.bundle).manifest.measures
    assert {"head_score", "kept_coordinates"} <= {measure.metric for measure in measures}
