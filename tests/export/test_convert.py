import onnx
import pytest
import torch
from torch import nn

from edge.bundles.manifest import Tolerance
from edge.errors import GoldenError
from export.models.attention import MultiHeadAttention
from export.models.convert import golden_of, largest_difference, to_onnx
from export.papers.calculator.networks import create

EXACT = Tolerance(atol=0.0, rtol=0.0)
CLOSE = Tolerance(atol=1e-4, rtol=1e-5)
VARIANTS = [
    ("calculator-oracle", None),
    ("calculator-fnn2", None),
    *(("calculator-transformer4", mode) for mode in (None, "fixed", "literal")),
]


@pytest.fixture(scope="module")
def converted(splits):
    """Networks and their ONNX models; scorers are spread so that heads shrink in many ways."""
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
def test_a_plain_graph_agrees_with_torch_on_every_split(variant, converted, splits):
    model, data = converted[variant]
    for split in splits.values():
        tolerance = EXACT if variant[0] == "calculator-oracle" else CLOSE
        assert largest_difference(data, golden_of(model, {"x": split.tokens}, ["value"]), tolerance, variant[0]) < 1e-4
    graph = onnx.load_from_string(data).graph
    assert [item.name for item in (*graph.input, *graph.output)] == ["x", "value"]
    assert not {node.op_type for node in graph.node} & {"If", "Loop", "Scan", "NonZero", "Where", "SequenceAt"}
    assert b".py" not in data, "a path of this machine"
    assert not any(node.metadata_props or node.doc_string for node in graph.node)
    if variant[1]:
        with torch.no_grad():
            kept = model.kept(model.scored(torch.from_numpy(splits["val"].tokens))[1]).sum(-1)
        assert kept.min() < kept.max() == 4, "some heads shrink"


def test_a_difference_beyond_the_tolerance_is_rejected(converted, splits):
    golden = golden_of(create("calculator-fnn2", 1), {"x": splits["val"].tokens}, ["value"])
    with pytest.raises(GoldenError, match="output 'value' on 636 golden rows: got a largest difference of"):
        largest_difference(converted["calculator-fnn2", None][1], golden, CLOSE, "fnn2")
