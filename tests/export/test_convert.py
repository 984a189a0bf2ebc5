import importlib.util

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from edge.bundles.manifest import Tolerance
from edge.errors import GoldenError
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.attention import MultiHeadAttention
from export.calculator.models import MODELS, create
from export.convert import OPSET, golden_of, largest_difference, to_onnx

EXACT = Tolerance(atol=0.0, rtol=0.0)
CLOSE = Tolerance(atol=1e-4, rtol=1e-5)
VARIANTS = [
    *((name, None) for name in MODELS),
    ("calculator-transformer4", "fixed"),
    ("calculator-transformer4", "literal"),
]


@pytest.fixture(scope="module")
def converted(splits):
    """Every kind of network and its ONNX model; scorers are spread so that heads shrink in many ways."""
    found = {}
    for name, adaptive in VARIANTS:
        model = create(name, 0, **({"adaptive": adaptive} if adaptive else {}))
        for module in model.modules():
            if isinstance(module, MultiHeadAttention) and module.scorer is not None:
                nn.init.normal_(module.scorer.layers[-2].weight, std=5.0, generator=torch.Generator().manual_seed(0))
                nn.init.constant_(module.scorer.layers[-2].bias, -1.0)
        example = torch.from_numpy(splits["val"].tokens[:2])
        found[name, adaptive] = model, to_onnx(model, {"x": example}, ["value"], {"x": {0: "batch"}})
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_onnx_runtime_agrees_with_torch_on_every_split(variant, converted, splits):
    model, data = converted[variant]
    for split in splits.values():
        tolerance = EXACT if variant[0] == "calculator-oracle" else CLOSE
        assert largest_difference(data, golden_of(model, {"x": split.tokens}, ["value"]), tolerance, variant[0]) < 1e-4


def test_oracle_is_exact_in_onnx_runtime(converted, splits):
    runner = OnnxRuntimeRunner(converted["calculator-oracle", None][1], subject="oracle")
    for split in splits.values():
        assert np.abs(runner.infer({"x": split.tokens})["value"][:, 0] - split.truth).max() == 0.0


@pytest.mark.parametrize("mode", ["fixed", "literal"])
def test_the_adaptive_graphs_do_shrink_heads(mode, converted, splits):
    model, _ = converted["calculator-transformer4", mode]
    with torch.no_grad():
        kept = model.kept(model.scored(torch.from_numpy(splits["val"].tokens))[1])
    per_head = kept.sum(-1)
    assert per_head.min() < per_head.max() == 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_graph_is_plain_onnx(variant, converted):
    model = onnx.load_from_string(converted[variant][1])
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", OPSET)]
    assert [item.name for item in model.graph.input] == ["x"]
    assert [item.name for item in model.graph.output] == ["value"]
    assert not model.functions
    operators = {node.op_type for node in model.graph.node}
    assert not operators & {"If", "Loop", "Scan", "NonZero", "Where", "SequenceAt"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_graph_names_no_path_of_this_machine(variant, converted):
    data = converted[variant][1]
    assert b".py" not in data
    assert not any(node.metadata_props or node.doc_string for node in onnx.load_from_string(data).graph.node)


@pytest.mark.parametrize("batch", [1, 2, 256])
def test_any_batch_size_runs(batch, converted, splits):
    runner = OnnxRuntimeRunner(converted["calculator-transformer4", "fixed"][1], subject="transformer4")
    tokens = splits["in_range"].tokens[:batch]
    assert runner.inputs[0].shape == (-1, 15)
    assert runner.infer({"x": tokens})["value"].shape == (batch, 1)


def test_a_row_does_not_depend_on_its_neighbours(converted, splits):
    runner = OnnxRuntimeRunner(converted["calculator-transformer4", "fixed"][1], subject="transformer4")
    tokens = splits["in_range"].tokens[:8]
    alone = np.concatenate([runner.infer({"x": tokens[row : row + 1]})["value"] for row in range(8)])
    np.testing.assert_allclose(runner.infer({"x": tokens})["value"], alone, atol=1e-4)


def test_a_difference_beyond_the_tolerance_is_refused(converted, splits):
    golden = golden_of(create("calculator-fnn2", 1), {"x": splits["val"].tokens}, ["value"])
    with pytest.raises(GoldenError, match="output 'value' on 636 golden rows: got a largest difference of"):
        largest_difference(converted["calculator-fnn2", None][1], golden, CLOSE, "fnn2")


class TwoOutputs(nn.Module):
    def forward(self, a, b):
        return a + b, a - b


def test_several_inputs_and_outputs():
    a, b = (np.arange(6, dtype=np.float32).reshape(3, 2) * scale for scale in (1.0, 0.5))
    tensors = {"a": torch.from_numpy(a), "b": torch.from_numpy(b)}
    data = to_onnx(TwoOutputs(), tensors, ["sum", "difference"], {name: {0: "batch"} for name in tensors})
    golden = golden_of(TwoOutputs(), {"a": a, "b": b}, ["sum", "difference"])
    assert list(golden.outputs) == ["sum", "difference"]
    assert largest_difference(data, golden, EXACT, "two") == 0.0


@pytest.mark.skipif(not importlib.util.find_spec("tensorrt_rtx"), reason="needs the extra rtx")
@pytest.mark.parametrize("variant", VARIANTS)
def test_tensorrt_builds_the_graph(variant, converted):
    import tensorrt_rtx as trt

    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(converted[variant][1]), [parser.get_error(index).desc() for index in range(parser.num_errors)]
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM86, 0)  # ahead of time: no GPU is needed
    profile = builder.create_optimization_profile()
    profile.set_shape("x", (1, 15), (8, 15), (256, 15))
    config.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, config) is not None
