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
NAMES = ("calculator-oracle", "calculator-fnn2", "calculator-transformer4")


class Scored(nn.Module):
    """Adaptive attention over the tokens of an expression, with a scorer that is spread so that heads shrink."""

    def __init__(self, mode):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.attention = nn.Linear(1, 32), MultiHeadAttention(32, 8, 4, mode)
        nn.init.normal_(self.attention.scorer.layers[-2].weight, std=5.0)
        nn.init.constant_(self.attention.scorer.layers[-2].bias, -1.0)

    def attended(self, x):
        return self.attention(self.embedding(x[:, :, None]))

    def forward(self, x):
        return self.attended(x)[0][:, 0]


@pytest.fixture(scope="module")
def converted(splits):
    """Networks and their ONNX models."""
    models = {name: create(name, 0) for name in NAMES} | {mode: Scored(mode) for mode in ("fixed", "literal")}
    example = {"x": torch.from_numpy(splits["val"].tokens[:2])}
    return {name: (model, to_onnx(model, example, ["value"], {"x": {0: "batch"}})) for name, model in models.items()}


@pytest.mark.parametrize("name", [*NAMES, "fixed", "literal"])
def test_a_plain_graph_agrees_with_torch_on_every_split(name, converted, splits):
    model, data = converted[name]
    for split in splits.values():
        tolerance = EXACT if name == "calculator-oracle" else CLOSE
        assert largest_difference(data, golden_of(model, {"x": split.tokens}, ["value"]), tolerance, name) < 1e-4
    graph = onnx.load_from_string(data).graph
    assert [item.name for item in (*graph.input, *graph.output)] == ["x", "value"]
    assert not {node.op_type for node in graph.node} & {"If", "Loop", "Scan", "NonZero", "Where", "SequenceAt"}
    assert b".py" not in data, "a path of this machine"
    assert not any(node.metadata_props or node.doc_string for node in graph.node)
    if isinstance(model, Scored):
        with torch.no_grad():
            kept = model.attention.keep(model.attended(torch.from_numpy(splits["val"].tokens))[1]).sum(-1)
        assert kept.min() < kept.max() == 4, "some heads shrink"


def test_a_difference_beyond_the_tolerance_is_rejected(converted, splits):
    golden = golden_of(create("calculator-fnn2", 1), {"x": splits["val"].tokens}, ["value"])
    with pytest.raises(GoldenError, match="output 'value' on 636 golden rows: got a largest difference of"):
        largest_difference(converted["calculator-fnn2"][1], golden, CLOSE, "fnn2")
