"""The builder with TensorRT-RTX, which compiles without a GPU: engines, fused attention, and errors."""

import signal
from unittest.mock import Mock

import pytest

from edge.bundles.manifest import Profile
from edge.errors import BackendError, BundleError
from edge.runtimes.tensorrt.build import compile_onnx
from tests.data.make_broken_bundles import changed_onnx, custom_operator
from tests.support.marks import with_rtx
from tests.support.models import ATTENTION_HEADS, ATTENTION_SEQUENCE, attention_onnx, oracle_manifest, oracle_onnx

pytestmark = with_rtx

ORACLE_PROFILE = oracle_manifest().profile


def compiled(model, profile=ORACLE_PROFILE, device="SM86", **more):
    return compile_onnx(model, profile, flavor="tensorrt_rtx", compute_capability=device, subject="model", **more)


def test_report_of_a_model_without_attention():
    engine = compiled(oracle_onnx())
    report = engine.report
    assert len(engine.data) > 10_000
    assert (report.layers, report.attention_blocks, report.attention_fused) == (8, 0, None)
    assert (report.attention, report.builder, report.version[:2]) == ("no attention", "tensorrt_rtx", "1.")
    assert report.seconds > 0
    assert not report.index_limits


def test_attention_is_fused_or_the_report_says_why_not():
    for head_dim, datatype, found in (
        (16, "FP16", "fused"),
        (8, "FP16", "not fused: head dimension 8 is below 16"),
        (272, "FP16", "not fused: head dimension 272 is above 256"),
        (16, "FP32", "not fused: FP32, and fusion needs FP16"),
    ):
        rest = (ATTENTION_SEQUENCE, ATTENTION_HEADS * head_dim)
        profile = {"x": Profile(min=(1, *rest), opt=(4, *rest), max=(8, *rest))}
        engine = compiled(attention_onnx(head_dim, datatype), profile)
        assert (b"_gemm_mha_v2" in engine.data) == engine.report.attention_fused == (found == "fused")
        assert engine.report.attention == f"1 block, {found}"


def test_progress():
    reported = []
    compiled(oracle_onnx(), progress=reported.append)
    assert reported[0].phase == "Building engine"
    fractions = [progress.fraction for progress in reported]
    assert (fractions, fractions[0], fractions[-1], len(set(fractions)) > 5) == (sorted(fractions), 0, 1, True)


def test_interrupt_cancels_the_build():
    reported = []

    def interrupted_once(position):
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


def test_profile_of_an_unknown_input_is_rejected(caplog):
    with pytest.raises(BackendError, match=r"expected a model that tensorrt_rtx .* builds"):
        compiled(oracle_onnx(), {"other": ORACLE_PROFILE["x"]})
    assert "tensorrt_rtx: " in caplog.text


def test_unusable_models_are_rejected():
    unknown = r"at node 'relu' \(Frobnicate\), expected an ONNX model that tensorrt_rtx"
    for model, kind, message in (
        (oracle_onnx()[:1000], BundleError, "model: got broken protobuf, expected an ONNX model"),
        (b"\x08\x08", BackendError, r"expected an ONNX model that tensorrt_rtx .* parses"),
        (changed_onnx(custom_operator), BackendError, unknown),
    ):
        with pytest.raises(kind, match=message):
            compiled(model)
    # TensorRT-RTX multiplies no FP32 on Turing, and a strongly typed network stays FP32.
    with pytest.raises(BackendError, match=r"model: got .*Turing.* expected a model that tensorrt_rtx .* builds"):
        compiled(oracle_onnx(), device="SM75")
