"""Bundles of the calculators in ONNX Runtime and in TensorRT-RTX."""

from collections import Counter

import onnx
import pytest
import torch

from edge.bundles.bundle import Bundle
from edge.bundles.expression import TOKENS
from edge.bundles.golden import check_runner
from edge.bundles.manifest import Profile
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from edge.runtimes.tensorrt.build import compile_onnx
from export.models.convert import to_onnx
from export.papers.calculator.benchmark import evaluate
from export.papers.calculator.networks import Transformer
from export.papers.calculator.specs import SPECS
from export.quantize.precision import half
from tests.support.calculators import EACH, export_untrained, untrained
from tests.support.marks import with_rtx

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
    assert not any(node.metadata_props or node.doc_string for node in model.graph.node)
    assert b".py" not in data, "a path of this machine"
    assert (manifest.name, manifest.version, manifest.max_batch_size) == (name, 1, 256)
    assert ([tier.name for tier in manifest.tiers], set(manifest.files)) == (["x1"], {"model.onnx", "golden.npz"})
    assert manifest.preprocess.max_abs_operand == (1024 if name == "calculator-oracle" else 1e6)


def test_measures_are_of_the_exported_graph(splits, tmp_path):
    bundle = export_untrained("calculator-lstm", tmp_path, on_rows=lambda *counted: None)
    measures = Bundle.open(bundle).manifest.measures
    torchs = evaluate(untrained("calculator-lstm").predict, splits)
    assert {(m.metric, m.split): m.value for m in measures} == pytest.approx(
        {(m.metric, m.split): m.value for m in torchs}, rel=1e-4
    )
    assert measures != torchs
    assert {measure.metric for measure in measures} == {"mae", "mre", "exact_match", "score", "paper_score"}


PROFILE = {"x": Profile(min=(1, TOKENS), opt=(8, TOKENS), max=(256, TOKENS))}
#: Of attention, which TensorRT-RTX 1.7 never fuses in FP32; in FP16 it needs heads of 16 features.
BLOCKS = {"calculator-transformer4": 3, "calculator-transformer5": 6, "calculator-transformer0": 6}


def compiled(data):
    return compile_onnx(data, PROFILE, flavor="tensorrt_rtx", compute_capability="SM86", subject="calculator").report


@with_rtx
@pytest.mark.parametrize("name", EACH)
def test_every_calculator_compiles(name, calculator):
    bundle = Bundle.open(calculator(name))
    assert bundle.manifest.profile == PROFILE
    report = compiled((bundle.path / bundle.artifact("tensorrt").file).read_bytes())
    unfused = "not fused: FP32, and fusion needs FP16"
    assert report.attention == (f"{BLOCKS[name]} blocks, {unfused}" if name in BLOCKS else "no attention")
    assert report.notes == ()


@with_rtx
def test_attention_in_fp16_is_fused_only_for_heads_of_16_features(calculator):
    torch.manual_seed(0)
    model = Transformer(128, num_layers=2, num_heads=8, hidden=128)
    wide = to_onnx(model, {"x": torch.zeros(2, TOKENS)}, ["value"], {"x": {0: "batch"}})
    narrow = (calculator("calculator-transformer4") / "model.onnx").read_bytes()
    assert compiled(half(wide)).attention == "2 blocks, fused"
    assert compiled(half(narrow)).attention == "3 blocks, not fused: head dimension 4 is below 16"
