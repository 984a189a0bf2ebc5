"""TensorRT-RTX compiles for real, without a GPU: engines, fused attention, and the refusals."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from typing import Any
from unittest.mock import Mock

import pytest
from onnx import TensorProto, helper

from edge.bundles.manifest import Profile
from edge.errors import BackendError, BundleError
from edge.runtimes.runtime import BuildProgress
from edge.runtimes.tensorrt_builder import CompiledEngine, compile_onnx
from tests.data.make_broken_bundles import changed_onnx, custom_operator, external_data
from tests.support import text_model
from tests.support.marks import with_rtx
from tests.support.models import (
    ATTENTION_HEADS,
    ATTENTION_SEQUENCE,
    attention_onnx,
    oracle_manifest,
    oracle_onnx,
    serialized,
)

pytestmark = with_rtx

ORACLE_PROFILE = oracle_manifest().profile
KERNEL = b"_gemm_mha_v2"


def compiled(
    model: bytes, profile: dict[str, Profile] = ORACLE_PROFILE, device: str = "SM86", **more: Any
) -> CompiledEngine:
    return compile_onnx(model, profile, flavor="tensorrt_rtx", compute_capability=device, subject="model", **more)


def attention(head_dim: int, datatype: str = "FP16") -> CompiledEngine:
    rest = (ATTENTION_SEQUENCE, ATTENTION_HEADS * head_dim)
    profile = {"x": Profile(min=(1, *rest), opt=(4, *rest), max=(8, *rest))}
    return compiled(attention_onnx(head_dim, datatype), profile)


@pytest.mark.parametrize("device", ["SM80", "SM86", "SM120"])
def test_oracle(device: str):
    engine = compiled(oracle_onnx(), device=device)
    assert len(engine.data) > 10_000
    assert engine.report.layers == 8
    assert engine.report.attention_blocks == 0
    assert engine.report.attention_fused is None
    assert engine.report.attention == "no attention"
    assert engine.report.builder == "tensorrt_rtx"
    assert engine.report.version.startswith("1.")
    assert engine.report.seconds > 0


@pytest.mark.parametrize("head_dim", [16, 32])
def test_attention_is_fused(head_dim: int):
    engine = attention(head_dim)
    assert KERNEL in engine.data
    assert engine.report.attention_fused is True
    assert engine.report.attention == "1 block, fused"


@pytest.mark.parametrize(
    ("head_dim", "datatype", "why"),
    [
        (8, "FP16", "head dimension 8 is below 16"),
        (272, "FP16", "head dimension 272 is above 256"),
        (16, "FP32", "FP32, and fusion needs FP16"),
    ],
)
def test_attention_that_is_not_fused_says_why(head_dim: int, datatype: str, why: str):
    engine = attention(head_dim, datatype)
    assert KERNEL not in engine.data
    assert engine.report.attention_fused is False
    assert engine.report.attention == f"1 block, not fused: {why}"


def test_the_report_has_the_sizes_of_tables_that_inputs_index():
    report = compiled(text_model.model("full"), text_model.manifest().profile).report
    assert report.index_limits == {"input_ids": len(text_model.WORDS)}
    assert not compiled(oracle_onnx()).report.index_limits


def test_softmax_at_the_end_is_no_attention():
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "x"], ["scores"]), helper.make_node("Softmax", ["scores"], ["y"], axis=-1)],
        "classifier",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 4])],
    )
    assert compiled(serialized(graph), {}).report.attention_blocks == 0


def test_progress():
    reported: list[BuildProgress] = []
    compiled(oracle_onnx(), progress=reported.append)
    assert reported[0].phase == "Building engine"
    assert len({progress.phase for progress in reported}) > 3
    fractions = [progress.fraction for progress in reported]
    assert fractions == sorted(fractions)
    assert fractions[0] == 0
    assert fractions[-1] == 1
    assert len(set(fractions)) > 5


def test_interrupt_cancels_the_build():
    reported: list[BuildProgress] = []

    def interrupted_once(position: BuildProgress) -> None:
        if not reported:
            signal.raise_signal(signal.SIGINT)
        reported.append(position)

    with pytest.raises(KeyboardInterrupt):
        compiled(oracle_onnx(), progress=interrupted_once)
    assert len(reported) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_error_of_the_progress_is_not_lost():
    with pytest.raises(BrokenPipeError):
        compiled(oracle_onnx(), progress=Mock(side_effect=BrokenPipeError))


def test_broken_model():
    with pytest.raises(BundleError, match="model: got broken protobuf, expected an ONNX model"):
        compiled(oracle_onnx()[:1000])


def test_weights_in_another_file():
    with pytest.raises(BundleError, match="model: got external data"):
        compiled(changed_onnx(external_data))


def test_no_graph_at_all():
    with pytest.raises(BackendError, match=r"expected an ONNX model that tensorrt_rtx .* parses"):
        compiled(b"\x08\x08")


def test_unknown_operator_names_the_node():
    with pytest.raises(BackendError, match=r"at node 'relu' \(Frobnicate\), expected an ONNX model that tensorrt_rtx"):
        compiled(changed_onnx(custom_operator))


def test_profile_of_an_input_that_is_not_there_cannot_be_built(caplog: pytest.LogCaptureFixture):
    with pytest.raises(BackendError, match=r"expected a model that tensorrt_rtx .* builds"):
        compiled(oracle_onnx(), {"other": ORACLE_PROFILE["x"]})
    assert "tensorrt_rtx: " in caplog.text


def test_model_that_the_gpu_cannot_run():
    # Strongly typed: FP32 stays FP32, which TensorRT-RTX does not multiply on Turing.
    with pytest.raises(BackendError, match=r"model: got .*Turing.* expected a model that tensorrt_rtx .* builds"):
        compiled(oracle_onnx(), device="SM75")


@pytest.mark.skipif(find_spec("tensorrt") is not None, reason="this machine has TensorRT")
def test_missing_tensorrt():
    with pytest.raises(BackendError, match=r"tensorrt: got .*Install JetPack's python3-libnvinfer"):
        compile_onnx(oracle_onnx(), {}, flavor="tensorrt", compute_capability=None, subject="model")
