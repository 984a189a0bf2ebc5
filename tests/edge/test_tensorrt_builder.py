"""The builder with TensorRT-RTX, which compiles without a GPU: engines, fused attention, and errors."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from onnx import TensorProto, helper

from edge.bundles.manifest import Profile
from edge.errors import BackendError, BundleError
from edge.runtimes.runtime import BuildProgress, Product
from edge.runtimes.tensorrt_builder import compile_onnx
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


def compiled(model: bytes, profile: dict[str, Profile] = ORACLE_PROFILE, device: str = "SM86", **more: Any) -> Product:
    return compile_onnx(model, profile, flavor="tensorrt_rtx", compute_capability=device, subject="model", **more)


def attention(head_dim: int, datatype: str = "FP16") -> Product:
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


@pytest.mark.parametrize(
    ("head_dim", "datatype", "obstacle"),
    [
        (16, "FP16", ""),
        (32, "FP16", ""),
        (8, "FP16", "head dimension 8 is below 16"),
        (272, "FP16", "head dimension 272 is above 256"),
        (16, "FP32", "FP32, and fusion needs FP16"),
    ],
)
def test_attention_is_fused_or_the_report_says_why_not(head_dim: int, datatype: str, obstacle: str):
    engine = attention(head_dim, datatype)
    assert (KERNEL in engine.data) == engine.report.attention_fused == (not obstacle)
    assert engine.report.attention == (f"1 block, not fused: {obstacle}" if obstacle else "1 block, fused")


def test_report_has_the_index_limits():
    report = compiled(text_model.model("full"), text_model.manifest().profile).report
    assert report.index_limits == {"input_ids": len(text_model.WORDS)}
    assert not compiled(oracle_onnx()).report.index_limits


def test_softmax_without_a_second_product_is_no_attention():
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


def test_error_of_the_progress_callback_is_raised():
    with pytest.raises(BrokenPipeError):
        compiled(oracle_onnx(), progress=Mock(side_effect=BrokenPipeError))


def test_profile_of_an_unknown_input_is_rejected(caplog: pytest.LogCaptureFixture):
    with pytest.raises(BackendError, match=r"expected a model that tensorrt_rtx .* builds"):
        compiled(oracle_onnx(), {"other": ORACLE_PROFILE["x"]})
    assert "tensorrt_rtx: " in caplog.text


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        (lambda: oracle_onnx()[:1000], BundleError, "model: got broken protobuf, expected an ONNX model"),
        (lambda: changed_onnx(external_data), BundleError, "model: got external data"),
        (lambda: b"\x08\x08", BackendError, r"expected an ONNX model that tensorrt_rtx .* parses"),
        (
            lambda: changed_onnx(custom_operator),
            BackendError,
            r"at node 'relu' \(Frobnicate\), expected an ONNX model that tensorrt_rtx",
        ),
    ],
    ids=["broken", "external weights", "no graph", "unknown operator"],
)
def test_unusable_models_are_rejected(model: Callable[[], bytes], kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        compiled(model())


def test_model_that_the_gpu_cannot_run_is_rejected():
    # TensorRT-RTX multiplies no FP32 on Turing, and a strongly typed network stays FP32.
    with pytest.raises(BackendError, match=r"model: got .*Turing.* expected a model that tensorrt_rtx .* builds"):
        compiled(oracle_onnx(), device="SM75")
