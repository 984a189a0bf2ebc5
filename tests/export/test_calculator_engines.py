"""The graphs of the calculators in TensorRT-RTX: each compiles, its recurrent operators, too.

The bundles have FP32 files alone, whose attention TensorRT-RTX 1.7 never fuses. Nor would FP16 help transformer4 and
transformer5, whose heads have 4 and 8 features: fusion needs 16.
"""

import pytest
import torch

from edge.bundles.bundle import Bundle
from edge.bundles.expression import TOKENS
from edge.bundles.manifest import Profile
from edge.runtimes.tensorrt.build import compile_onnx
from export.models.convert import to_onnx
from export.papers.calculator.networks import Transformer
from export.quantize.precision import half
from tests.support.calculators import EACH
from tests.support.marks import with_rtx

pytestmark = with_rtx

PROFILE = {"x": Profile(min=(1, TOKENS), opt=(8, TOKENS), max=(256, TOKENS))}
BLOCKS = {"calculator-transformer4": 3, "calculator-transformer5": 6, "calculator-transformer0": 6}


def compiled(data):
    return compile_onnx(data, PROFILE, flavor="tensorrt_rtx", compute_capability="SM86", subject="calculator").report


@pytest.mark.parametrize("name", EACH)
def test_every_calculator_compiles(name, calculator):
    bundle = Bundle.open(calculator(name))
    assert bundle.manifest.profile == PROFILE
    report = compiled((bundle.path / bundle.artifact("tensorrt").file).read_bytes())
    unfused = "not fused: FP32, and fusion needs FP16"
    assert report.attention == (f"{BLOCKS[name]} blocks, {unfused}" if name in BLOCKS else "no attention")
    assert (report.typing, report.notes) == ("strong", ())


def test_attention_in_fp16_is_fused_only_for_heads_of_16_features(calculator):
    torch.manual_seed(0)
    model = Transformer(128, num_layers=2, num_heads=8, hidden=128)
    wide = to_onnx(model, {"x": torch.zeros(2, TOKENS)}, ["value"], {"x": {0: "batch"}})
    narrow = (calculator("calculator-transformer4") / "model.onnx").read_bytes()
    assert compiled(half(wide)).attention == "2 blocks, fused"
    assert compiled(half(narrow)).attention == "3 blocks, not fused: head dimension 4 is below 16"
