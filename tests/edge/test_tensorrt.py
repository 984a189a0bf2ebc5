"""Builds for TensorRT without a GPU: profiles, engines of TensorRT-RTX, and the double that fuses like it."""

import functools
import signal
from unittest.mock import Mock

import numpy as np
import pytest

from edge.bundles.manifest import Profile
from edge.errors import BackendError, BundleError
from edge.runtimes.runtime import BuildProgress
from edge.runtimes.tensorrt.build import compile_onnx, memory_needed
from edge.runtimes.tensorrt.network import Attention, attention_blocks, index_limits, unexplained
from edge.runtimes.tensorrt.package import BuilderLog
from edge.runtimes.tensorrt.profiles import buckets, described, optimization_profiles
from tests.data.make_broken_bundles import changed_onnx, custom_operator
from tests.device.doubles import double as trt_double
from tests.device.networks import classifier
from tests.support.marks import with_rtx
from tests.support.models import (
    ATTENTION_HEADS,
    ATTENTION_SEQUENCE,
    attention_onnx,
    graph_of,
    oracle_manifest,
    oracle_onnx,
    serialized,
)

MIB = 1024**2


def text(shortest, longest, rows=8):
    shapes = Profile(min=(1, shortest), opt=(1, min(64, longest)), max=(rows, longest))
    return {"input_ids": shapes, "attention_mask": shapes}


def test_buckets_cover_every_length_once():
    for shortest, longest, expected in (
        (1, 512, [(1, 32), (33, 64), (65, 128), (129, 256), (257, 512)]),
        (40, 100, [(40, 64), (65, 100)]),
        (1, 32, [(1, 32)]),
        (1, 33, [(1, 32), (33, 33)]),
        (1, 8192, [(1, 32), (33, 64), (65, 128), (129, 256), (257, 512), (513, 8192)]),
    ):
        profiles = buckets(text(shortest, longest))
        assert [(one["input_ids"].min[1], one["input_ids"].max[1]) for one in profiles] == expected
        for one in profiles:
            shapes = one["input_ids"]
            assert (one["attention_mask"], shapes.min[0], shapes.opt[0], shapes.max[0]) == (shapes, 1, 1, 8)
            assert shapes.opt[1] == shapes.max[1]


def test_only_one_sequence_axis_is_cut():
    image = {"pixels": Profile(min=(1, 3, 32, 32), opt=(1, 3, 224, 224), max=(4, 3, 512, 640))}
    two = {**text(1, 512), "other": Profile(min=(1, 1), opt=(1, 8), max=(8, 100))}
    fixed = {"x": Profile(min=(1, 15), opt=(8, 15), max=(64, 15))}
    for profile in (image, two, fixed):
        assert buckets(profile) == (profile,)
    assert buckets({}) == ()
    beside = {**text(1, 64), "x": Profile(min=(1, 15), opt=(8, 15), max=(64, 15))}
    assert [one["x"] for one in buckets(beside)] == [beside["x"], beside["x"]]
    assert described(buckets(text(1, 64))[1]) == "attention_mask 1x33..1x64..8x64, input_ids 1x33..1x64..8x64"


def test_several_profiles_of_a_file_are_not_cut():
    prompts, steps = text(2, 512), text(1, 1)
    assert optimization_profiles(steps, [prompts]) == (steps, prompts)
    assert optimization_profiles(prompts) == buckets(prompts) != (prompts,)


def test_builder_log_counts_skipped_tactics_and_finds_a_lack_of_memory():
    log = BuilderLog()
    log.hear("Using default for use_cuda_graph")
    assert (log.skipped_tactics, log.warning(), log.out_of_memory) == (0, "", "")
    for size in (4229, 512):
        log.hear(f"Tactic Device request: {size}MB Available: 2658MB. Device memory is insufficient to use tactic.")
        log.hear(
            f"UNSUPPORTED_STATESkipping tactic 0 due to insufficient memory on requested size of {size} detected for "
            "tactic 0x0000000000000000."
        )
    assert (log.skipped_tactics, log.out_of_memory) == (2, "")
    assert log.warning().startswith("2 tactics were skipped for lack of memory of up to 4,229 MiB each, so")
    log.hear("[virtualMemoryBuffer.cpp::resizePhysical::140] Error Code 2: OutOfMemory (Requested size was 8 bytes.)")
    assert "OutOfMemory" in log.out_of_memory


def test_unfused_attention_is_noted_only_if_fusion_is_possible():
    assert not unexplained([Attention("HALF", 32, 32)], True)
    for blocks, allowed in (
        ([Attention("HALF", 32, 32)], "32 in HALF"),
        ([Attention("HALF", 8, 8), Attention("BF16", 64, 64)], "64 in BF16"),
        ([Attention("HALF", 8, 8)], ""),
        ([Attention("FLOAT", 32, 32)], ""),
    ):
        expected = f"attention is not fused although head dimension {allowed} allows it"
        assert expected in unexplained(blocks, False) if allowed else not unexplained(blocks, False)


def test_memory_of_a_build_grows_with_the_model_and_the_workspace():
    small, large = memory_needed(10 * MIB, 512 * MIB), memory_needed(110 * MIB, 512 * MIB)
    assert large.size_bytes - small.size_bytes == 4 * 100 * MIB
    assert large.pinned_bytes - small.pinned_bytes == 2 * 100 * MIB
    assert memory_needed(10 * MIB, 256 * MIB).pinned_bytes == small.pinned_bytes - 256 * MIB
    assert 1700 * MIB < small.size_bytes - 512 * MIB < 2000 * MIB  # what was measured on an Orin: about 1.7 GB


def test_progress_for_people():
    assert str(BuildProgress("Timing", 0.42)) == "42 %"
    assert str(BuildProgress("Timing", 0.42, 45.4)) == "42 %, 45 s left"
    assert str(BuildProgress("Timing", 0.42, 181)) == "42 %, 3 min left"


ORACLE_PROFILE = oracle_manifest().profile


def compiled(model, profile=ORACLE_PROFILE, device="SM86", **more):
    return compile_onnx(model, profile, flavor="tensorrt_rtx", compute_capability=device, subject="model", **more)


@with_rtx
def test_report_of_a_model_without_attention():
    engine = compiled(oracle_onnx())
    report = engine.report
    assert len(engine.data) > 10_000
    assert (report.layers, report.attention_blocks, report.attention_fused) == (8, 0, None)
    assert (report.attention, report.builder, report.version[:2]) == ("no attention", "tensorrt_rtx", "1.")
    assert report.seconds > 0
    assert not report.index_limits


@with_rtx
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


@with_rtx
def test_progress():
    reported = []
    compiled(oracle_onnx(), progress=reported.append)
    assert reported[0].phase == "Building engine"
    fractions = [progress.fraction for progress in reported]
    assert (fractions, fractions[0], fractions[-1], len(set(fractions)) > 5) == (sorted(fractions), 0, 1, True)


@with_rtx
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


@with_rtx
def test_error_of_the_progress_callback_is_raised():
    with pytest.raises(BrokenPipeError):
        compiled(oracle_onnx(), progress=Mock(side_effect=BrokenPipeError))


@with_rtx
def test_profile_of_an_unknown_input_is_rejected(caplog):
    with pytest.raises(BackendError, match=r"expected a model that tensorrt_rtx .* builds"):
        compiled(oracle_onnx(), {"other": ORACLE_PROFILE["x"]})
    assert "tensorrt_rtx: " in caplog.text


@with_rtx
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


HEADS, LONG, INT8_LONG = 4, 128, 512


def quantized(*names):
    """Return nodes that quantize tensors and back; the results end with ``_d``."""
    pair = "{0}_q = QuantizeLinear({0}, step, zero) {0}_d = DequantizeLinear({0}_q, step, zero)"
    return " ".join(map(pair.format, names))


SCALED, WEIGHTS = "x = Mul(product, scale)", "s = Softmax<axis = -1>(x)"
INT8 = {
    "factors": f"{quantized('q', 'k', 'v')} t = Transpose<perm = [0, 1, 3, 2]>(k_d) product = MatMul(q_d, t)",
    "end": f"{quantized('s')} z = MatMul(s_d, v_d) {quantized('z').replace('z_d', 'y')}",
}
MASKED = "scaled = Mul(product, scale)"


def attention(
    size=32,
    value=None,
    mask="",
    factors="t = Transpose<perm = [0, 1, 3, 2]>(k) product = MatMul(q, t)",
    scores=SCALED,
    softmax=WEIGHTS,
    end="y = MatMul(s, v)",
):
    """Return softmax(q kᵀ · scale) v, with a variation; q and k have ``size`` features, v has ``value``."""
    value = value or size
    widths = {"q": size, "k": size, "v": value}
    inputs = ", ".join(f"float16[N, {HEADS}, S, {width}] {name}" for name, width in widths.items())
    inputs += f", {mask}[N, 1, 1, S] mask" if mask else ""
    half = np.float16
    constants = {"scale": half(0.25), "low": half(-1e4), "step": half(0.05), "zero": np.int8(0)}
    nodes = " ".join((factors, scores, softmax, end))
    text = f"attention ({inputs}) => (float16[N, {HEADS}, S, {value}] y) {{ {nodes} }}"
    return serialized(graph_of(text, **{name: one for name, one in constants.items() if name in nodes}))


def indices():
    """Return a model whose inputs index a table of 7 rows and 5 columns; ``INDEX_LIMITS`` has the limits."""
    text = """model (int64[n] both, int64[n, 5] elements, int64[n] changed, int64[n, 2] several, int64[n] dynamic,
            float[m, 4] x)
        => (float[?, ?] rows, float[?, ?, ?] columns, float[?, ?] each, float[?, ?] shifted, float[?] points,
            float[?, ?] parts) {
        rows = Gather(table, both)
        narrow = Cast<to = 6>(both)  column = Unsqueeze(narrow, last)  columns = Gather<axis = -1>(table, column)
        each = GatherElements<axis = 0>(table, elements)
        after = Add(changed, last)  shifted = Gather(table, after)
        points = GatherND(table, several)
        parts = Gather(x, dynamic)
    }"""
    return serialized(graph_of(text, table=np.zeros((7, 5), np.float32), last=np.array([1])))


INDEX_LIMITS = {"both": 5, "elements": 7}


MODELS = {"int8": classifier("int8"), "indices": indices()}
#: Attention, and the most tokens.
ATTENTION = {
    **{f"{size} features": (attention(size), LONG) for size in (8, 19, 264)},
    "wide values": (attention(16, 64), LONG),
    "mask": (attention(mask="float16", scores=f"{MASKED} x = Add(scaled, mask)"), LONG),
    "where": (attention(mask="bool", scores=f"{MASKED} x = Where(mask, scaled, low)"), LONG),
    "cast": (attention(softmax="w = Cast<to = 1>(x) p = Softmax<axis = -1>(w) s = Cast<to = 10>(p)"), LONG),
    **{f"int8, {size} features": (attention(size, **INT8), LONG) for size in (24, 64)},
    "int8, long": (attention(64, **INT8), INT8_LONG + 1),
}


def parsed(trt, network, model):
    """Return the tensors, the attention and the indices of the network that the parser reads."""
    assert trt.OnnxParser(network, network_logger(trt)).parse(model)
    ends = [network.get_input(index) for index in range(network.num_inputs)]
    ends += [network.get_output(index) for index in range(network.num_outputs)]
    tensors = [(end.name, end.dtype.name, tuple(end.shape)) for end in ends]
    names = [[end.get_dimension_name(axis) for axis in range(len(end.shape))] for end in ends if end.is_network_input]
    return tensors, names, attention_blocks(trt, network), index_limits(trt, network)


@functools.cache
def network_logger(trt):
    class Quiet(trt.ILogger):
        def __init__(self):
            super().__init__()

        def log(self, severity, message):
            pass

    return Quiet()


def copied(version="10.16.2.10"):
    double = trt_double(version)
    flags = 1 << int(double.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    return double, double.parser.new_network(double.native.Log(network_logger(double)), flags)


def networks():
    rtx = pytest.importorskip("tensorrt_rtx")
    builder = rtx.Builder(network_logger(rtx))
    return rtx, builder, builder.create_network(1 << int(rtx.NetworkDefinitionCreationFlag.STRONGLY_TYPED)), *copied()


@with_rtx
@pytest.mark.parametrize("name", MODELS)
def test_double_parses_like_tensorrt_rtx(name):
    rtx, _, real, double, copy = networks()
    assert parsed(double, copy, MODELS[name]) == parsed(rtx, real, MODELS[name])


@pytest.mark.parametrize("version", ["10.3.0", "10.16.2.10", "11.4.1"])
def test_indices_are_found_in_every_version(version):
    double, copy = copied(version)
    assert parsed(double, copy, MODELS["indices"])[-1] == INDEX_LIMITS


@with_rtx
@pytest.mark.parametrize("name", ATTENTION)
def test_double_fuses_like_tensorrt_rtx(name):
    rtx, builder, real, double, copy = networks()
    model, longest = ATTENTION[name]
    assert parsed(double, copy, model) == parsed(rtx, real, model)
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(rtx.ComputeCapability.SM86, 0)
    profile, batches = builder.create_optimization_profile(), ((1, 16), (2, 64), (8, longest))
    for index in range(real.num_inputs):
        shape = tuple(real.get_input(index).shape)
        sizes = ((rows, *(tokens if size == -1 else size for size in shape[1:])) for rows, tokens in batches)
        profile.set_shape(real.get_input(index).name, *sizes)
    config.add_optimization_profile(profile)
    engine = bytes(builder.build_serialized_network(real, config))
    assert bool(double.attention.fused_attention(copy, False, longest)) == (b"_gemm_mha_v2" in engine)


@with_rtx
def test_double_supports_only_operators_of_tensorrt_rtx():
    rtx, _, real, double, _ = networks()
    parser = rtx.OnnxParser(real, network_logger(rtx))
    assert not [operator for operator in double.parser._LAYERS if not parser.supports_operator(operator)]
