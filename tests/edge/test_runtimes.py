"""The table of runtimes, the simulated accelerator, and the runner for ONNX Runtime."""

import sys
import time
from importlib.util import find_spec
from types import ModuleType

import msgspec
import numpy as np
import onnxruntime
import pytest
from onnx import helper

from edge.bundles.bundle import Bundle, write_bundle
from edge.bundles.manifest import Artifact, Profile, Tier, Tolerance
from edge.datatypes import TensorSpec
from edge.errors import BackendError, BundleError, InvalidRequest, RunnerError, UsageError
from edge.runtimes import cuda
from edge.runtimes.build import load_runner
from edge.runtimes.cuda import DeviceFacts
from edge.runtimes.onnxruntime import OnnxRuntimeTensorRt
from edge.runtimes.onnxruntime_runner import CPU, OnnxRuntimeRunner
from edge.runtimes.onnxruntime_runner import CUDA as CUDA_PROVIDERS
from edge.runtimes.runtime import BuildOptions, Source
from edge.runtimes.table import RUNTIMES, choose, targets
from edge.runtimes.tensorrt import package
from tests.support.commands import mistake
from tests.support.letters_model import MAX_BATCH_SIZE, write_letters_bundle
from tests.support.marks import with_rtx
from tests.support.models import ORACLE_BUNDLE, graph_of, oracle_golden, oracle_manifest, oracle_onnx, serialized
from tests.support.server_models import table_graph, write_echo_bundle

# The installed ONNX Runtime decides between the two, on a Jetson as anywhere.
CUDA = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
NAME, DEVICE = ("onnxruntime-cuda", "GPU") if CUDA else ("onnxruntime", "CPU")

without_cuda = pytest.mark.skipif(CUDA, reason="this ONNX Runtime has CUDA")
without_tensorrt = pytest.mark.skipif(find_spec("tensorrt") is not None, reason="this machine has TensorRT")
without_rtx = pytest.mark.skipif(find_spec("tensorrt_rtx") is not None, reason="tensorrt_rtx is installed")


def test_auto_chooses_the_first_suitable_runtime_and_gives_the_reason():
    runtime = choose("auto")
    assert (runtime.name, runtime.device, runtime.thread_bound) == (NAME, DEVICE, CUDA)
    passed = [] if find_spec("tensorrt") else ["TensorRT cannot be used here (tensorrt: No module named 'tensorrt')."]
    if not CUDA:
        passed += [f"This ONNX Runtime has no {name}ExecutionProvider." for name in ("Tensorrt", "CUDA")]
    assert runtime.reason.startswith(" ".join([*passed, f"ONNX Runtime {onnxruntime.__version__} "]))


@pytest.mark.parametrize(
    ("target", "device", "artifact_runtime", "thread_bound"),
    [
        ("onnxruntime", "CPU", "onnxruntime", False),
        ("simulated:1", "GPU", "onnxruntime", True),
        pytest.param("tensorrt-rtx:SM86", "SM86", "tensorrt", False, marks=with_rtx),
    ],
)
def test_named_targets(target, device, artifact_runtime, thread_bound):
    runtime = choose(target)
    assert runtime.name == target.partition(":")[0]
    assert (runtime.device, runtime.artifact_runtime, runtime.thread_bound) == (device, artifact_runtime, thread_bound)
    assert runtime.reason.startswith("The target names it.")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        pytest.param("tensorrt", "tensorrt: got .*Install JetPack's python3-libnvinfer", marks=without_tensorrt),
        pytest.param("tensorrt-rtx:SM86", "tensorrt_rtx: got .*the extra 'rtx' on an x86-64", marks=without_rtx),
        pytest.param("onnxruntime-cuda", "CUDA{} got .*Install the extra 'cuda'", marks=without_cuda),
    ],
)
def test_error_of_a_missing_package_or_provider(target, message):
    with pytest.raises(BackendError, match=message.format("ExecutionProvider:")):
        choose(target)


@pytest.mark.parametrize("target", ["", "TENSORRT", "onnxruntime:SM86", "auto:"])
def test_unknown_target(target):
    with pytest.raises(UsageError, match=f"--target: got '{target}', expected {targets()}. Take auto"):
        choose(target)


def test_auto_prefers_tensorrt_then_its_provider_then_cuda_then_the_cpu():
    considered = [name for name, runtime in RUNTIMES.items() if name != "tensorrt" and runtime.suitability()]
    assert next(iter(RUNTIMES)) == "tensorrt"
    assert considered == ["onnxruntime-tensorrt", "onnxruntime-cuda", "onnxruntime"]
    tensorrt, on_cuda = RUNTIMES["onnxruntime-tensorrt"], RUNTIMES["onnxruntime-cuda"]
    assert (tensorrt.thread_bound, tensorrt.isolated_build, tensorrt.artifact_runtime) == (True, True, "tensorrt")
    assert (on_cuda.device, on_cuda.thread_bound) == ("GPU", True)


def test_cuda_uses_no_file_with_dynamic_int8(tmp_path):
    runtime = RUNTIMES["onnxruntime-cuda"]()

    def bundle_of(*files):
        rest = {"opset": 17, "tolerance": Tolerance(atol=1, rtol=0)}
        artifacts = [Artifact(file=f"{of}.{size}.onnx", runtime=of, precision=size, **rest) for of, size in files]
        tiers = (Tier(name="full", artifacts=tuple(artifacts)),)
        return Bundle(tmp_path, msgspec.structs.replace(oracle_manifest(), tiers=tiers), {})

    for files, chosen in (
        ([("onnxruntime", "fp32"), ("tensorrt", "int8")], "onnxruntime.fp32.onnx"),
        ([("onnxruntime", "int8"), ("tensorrt", "int8")], "tensorrt.int8.onnx"),
        ([("onnxruntime", "int8"), ("any", "fp32")], "any.fp32.onnx"),
    ):
        found = runtime.artifact(bundle_of(*files))
        assert (found.file, runtime.row_independent(found)) == (chosen, True)
    for name in ("onnxruntime", "any"):
        with pytest.raises(BundleError, match=r"got \['int8 for .*'\], expected FP32, FP16, or INT8 with fixed scales"):
            runtime.artifact(bundle_of((name, "int8")))


def test_gpu_rejects_dynamic_int8_in_a_file_for_any_runtime():
    graph = graph_of("dynamic (float[4] x) => (uint8[4] y) { y, scale, zero = DynamicQuantizeLinear(x) }")
    model = serialized(graph)
    OnnxRuntimeRunner(model, subject="model").close()
    with pytest.raises(BackendError, match=r"model: got dynamic INT8, expected FP32, FP16, or INT8 with fixed scales"):
        OnnxRuntimeRunner(model, subject="model", providers=CUDA_PROVIDERS)


@with_rtx
@pytest.mark.parametrize(("device", "given"), [("SM87", "'SM87'"), ("CURRENT", "'CURRENT'"), ("", "no compute")])
def test_unsupported_compute_capability(device, given):
    with pytest.raises(UsageError, match=rf"got {given}.*expected :SM75 :SM80 :SM86.*a Jetson Orin .SM87. is none"):
        choose(f"tensorrt-rtx:{device}")


def test_a_simulated_run_lasts_its_time_without_the_processor(tmp_path):
    loaded = load_runner(Bundle.open(ORACLE_BUNDLE), "simulated:50", tmp_path)
    golden = oracle_golden()
    for call in (loaded.runner.infer, loaded.runner.run):
        started, worked = time.perf_counter(), time.thread_time()
        outputs = call(golden.inputs)
        assert time.perf_counter() - started >= 0.05
        assert time.thread_time() - worked < 0.025
        np.testing.assert_array_equal(outputs["value"], golden.outputs["value"])
    assert loaded.golden_report.max_abs_diff == 0
    loaded.runner.close()


@pytest.mark.parametrize("duration", ["", "0", "-1", "nan", "inf", "60001", "1ms"])
def test_a_simulated_run_needs_a_duration(duration):
    with pytest.raises(UsageError, match=r"--target simulated: got .*, expected the milliseconds .* Write simulated:1"):
        choose(f"simulated:{duration}")


def test_a_simulated_accelerator_takes_one_instance(tmp_path):
    arguments = ["serve", str(tmp_path), "--target=simulated:1", "--instances=2", "--grpc-port=0", "--metrics-port=0"]
    assert "--instances: got 2, expected 1 on a GPU" in mistake(*arguments)


def test_cache_key_of_the_tensorrt_provider_contains_gpu_and_versions(monkeypatch):
    monkeypatch.setattr(OnnxRuntimeTensorRt, "version", classmethod(lambda _: "1.23"))
    keys = []
    for board in (("Orin", "8.7", "12.6"), ("Orin", "8.7", "13.0"), ("Thor", "11.0", "13.0")):
        monkeypatch.setattr(cuda, "facts", lambda board=board: DeviceFacts(*board, True))
        for version in ("10.3.0", "10.16.2"):
            monkeypatch.setattr(package, "version", lambda _, version=version: version)
            keys.append(OnnxRuntimeTensorRt().cache_key())
    assert len({tuple(sorted(key.items())) for key in keys}) == len(keys) == 6
    assert (keys[0]["device_name"], keys[0]["cuda"], keys[0]["tensorrt"]) == ("Orin", "12.6", "10.3.0")


def test_options_of_the_tensorrt_provider(tmp_path):
    runtime = OnnxRuntimeTensorRt()
    options = BuildOptions(workspace_bytes=2**20, timing_cache=tmp_path / "timing" / "x.bin")
    (name, given), (second, _) = runtime.providers(Source.of(Bundle.open(ORACLE_BUNDLE), runtime), options)
    assert (name, second) == ("TensorrtExecutionProvider", "CUDAExecutionProvider")
    assert given == {
        "trt_max_workspace_size": "1048576",
        "trt_fp16_enable": "False",
        "trt_int8_enable": "False",
        "trt_profile_min_shapes": "x:1x15",
        "trt_profile_opt_shapes": "x:8x15",
        "trt_profile_max_shapes": "x:64x15",
        "trt_timing_cache_enable": "True",
        "trt_timing_cache_path": str(tmp_path / "timing"),
    }


def test_the_tensorrt_provider_gets_one_profile_around_several(tmp_path):
    bundle = write_letters_bundle(tmp_path / "letters")
    (tier,) = bundle.manifest.tiers
    (artifact,) = tier.artifacts
    steps = artifact.profile | {"tokens": Profile(min=(1, 1), opt=(1, 1), max=(MAX_BATCH_SIZE, 1))}
    prompts = artifact.profile | {"tokens": Profile(min=(1, 2), opt=(2, 8), max=(MAX_BATCH_SIZE, 9))}
    artifact = msgspec.structs.replace(artifact, profile=prompts, more_profiles=(steps,))
    manifest = msgspec.structs.replace(bundle.manifest, tiers=(msgspec.structs.replace(tier, artifacts=(artifact,)),))
    files = {name: bundle.read(name) for name in bundle.manifest.files}
    bundle = write_bundle(tmp_path / "changed", manifest, files)
    runtime = OnnxRuntimeTensorRt()
    (_, given), _ = runtime.providers(Source.of(bundle, runtime, role="backbone"), BuildOptions())
    found = [given[f"trt_profile_{bound}_shapes"].split(",")[0] for bound in ("min", "opt", "max")]
    assert found == ["tokens:1x1", "tokens:2x8", "tokens:4x9"]


@pytest.fixture
def runner():
    return OnnxRuntimeRunner(oracle_onnx(), subject="oracle")


def test_runner_releases_the_bytes_of_the_file():
    model = oracle_onnx()
    before = sys.getrefcount(model)
    runner = OnnxRuntimeRunner(model, subject="oracle")
    assert sys.getrefcount(model) == before
    runner.close()


WIDTH = 6


def recurrent_onnx():
    """One step: x and state [batch, 6] to next = tanh(x @ wx + state @ ws) [batch, 6] and y = next @ wy [batch, 2]."""
    random = np.random.default_rng(0)
    weights = {"wx": (WIDTH, WIDTH), "ws": (WIDTH, WIDTH), "wy": (WIDTH, 2)}
    text = f"""recurrent (float[n, {WIDTH}] x, float[n, {WIDTH}] state) => (float[n, 2] y, float[n, {WIDTH}] next) {{
        a = MatMul(x, wx)  b = MatMul(state, ws)  c = Add(a, b)  next = Tanh(c)  y = MatMul(next, wy)
    }}"""
    return serialized(graph_of(text, **{n: random.normal(size=of).astype(np.float32) for n, of in weights.items()}))


@pytest.fixture
def recurrent():
    return OnnxRuntimeRunner(recurrent_onnx(), subject="recurrent")


@pytest.mark.parametrize("cuda", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_loop_with_handles_equals_one_with_arrays(cuda):
    if cuda and CUDA_PROVIDERS[0][0] not in onnxruntime.get_available_providers():
        pytest.skip("needs onnxruntime-gpu")
    runner = OnnxRuntimeRunner(recurrent_onnx(), subject="recurrent", providers=CUDA_PROVIDERS if cuda else CPU)
    steps = np.random.default_rng(1).normal(size=(50, 3, WIDTH)).astype(np.float32)
    start = np.ones((3, WIDTH), np.float32)
    handle = runner.upload(start)
    state, first = start.copy(), handle
    start[:] = 7  # the handle has a copy
    kept, expected = [], []
    for x in steps:
        on_device = runner.run({"x": x, "state": handle}, keep={"next"})
        on_host = runner.infer({"x": x, "state": state})
        handle, state = on_device["next"], on_host["next"]
        assert (handle.datatype, handle.shape) == ("FP32", (3, WIDTH))
        kept.append(on_device["y"])
        expected.append(on_host["y"])
    # Compared at the end, because a later run must not overwrite earlier outputs.
    np.testing.assert_array_equal(np.array(kept), np.array(expected))
    copy = handle.numpy()
    np.testing.assert_array_equal(copy, state)
    copy[:] = 0
    np.testing.assert_array_equal(handle.numpy(), state)
    np.testing.assert_array_equal(first.numpy(), np.ones((3, WIDTH), np.float32))


class Stranger:
    datatype, shape = "FP32", (1, WIDTH)


ROW = np.zeros((1, WIDTH), np.float32)


def test_invalid_tensors_are_rejected(recurrent):
    for state, keep, message in (
        (ROW[:, :2], "next", "input 'state' of recurrent: got FP32 [1, 2], expected FP32 [-1, 6]. Feed an output that"),
        (ROW.astype(np.float64), "next", "input 'state' of recurrent: got FP64 [1, 6], expected FP32 [-1, 6]."),
        (None, "next", "inputs of recurrent: got ['x'], expected ['state', 'x']. Feed each input of the graph once."),
        (ROW, "state", "keep of recurrent: got 'state', expected one of ['y', 'next']. Keep an output of the graph."),
        (Stranger(), "next", "input 'state' of recurrent: got a handle of Stranger, expected numbers in an array"),
    ):
        uploaded = recurrent.upload(state) if isinstance(state, np.ndarray) else state
        feeds = {"x": ROW} | ({} if uploaded is None else {"state": uploaded})
        with pytest.raises(InvalidRequest) as caught:
            recurrent.run(feeds, [keep])
        assert str(caught.value).startswith(message)
        assert recurrent.run({"x": ROW, "state": ROW}, ["next"])["next"].shape == (1, WIDTH)


def test_text_cannot_be_kept_on_the_device(recurrent, tmp_path):
    text = np.array([b"a"], object)
    with pytest.raises(InvalidRequest, match="upload to recurrent: got BYTES, expected numbers"):
        recurrent.upload(text)
    echo = OnnxRuntimeRunner(write_echo_bundle(tmp_path / "echo", "BYTES").read("model.onnx"), subject="echo")
    with pytest.raises(InvalidRequest, match="'in_bytes' of echo: got BYTES, expected numbers"):
        echo.run({"in_bytes": text})


@pytest.mark.parametrize("call", ["infer", "run"])
def test_error_of_the_runtime_is_only_in_the_log(caplog, call):
    graph = graph_of("product (float[m, n] a, float[m, n] b) => (float[m, n] y) { y = MatMul(a, b) }")
    runner = OnnxRuntimeRunner(serialized(graph), subject="product")
    with pytest.raises(RunnerError, match=r"product: got \w+, expected an answer. See the server's log.") as caught:
        getattr(runner, call)({"a": np.zeros((2, 3), np.float32), "b": np.zeros((2, 3), np.float32)})
    assert "dimension" not in str(caught.value)
    assert "dimension" in caplog.text
    runner.close()
    with pytest.raises(RunnerError):
        getattr(runner, call)({"a": np.zeros((2, 3), np.float32), "b": np.zeros((3, 2), np.float32)})


def test_index_outside_its_table_is_refused(caplog, capfd):
    runner = OnnxRuntimeRunner(serialized(table_graph(100)), subject="table")
    for call in (runner.infer, runner.run):
        for index in (100, -101):
            with pytest.raises(InvalidRequest) as caught:
                call({"ids": np.array([[1], [index]])})
            assert str(caught.value) == (
                f"an input of table: got {index}, expected values from -100 to 99, the rows of a table of the model. "
                "Send the token ids of this model's own tokenizer."
            )
    # What optimizations make of the embeddings of a BERT.
    text = """embed (int32[1, 1] ids) => (float[1, 1, 4] y) {
        y, z = com.microsoft.EmbedLayerNormalization(ids, , words, places, , ones, ones)
    }"""
    shapes = {"words": (9, 4), "places": (9, 4), "ones": (4,)}
    graph = graph_of(text, **{name: np.ones(shape, np.float32) for name, shape in shapes.items()})
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    with pytest.raises(InvalidRequest, match="got an index outside its table, expected values inside"):
        OnnxRuntimeRunner(model, subject="bert").infer({"ids": np.array([[9]], np.int32)})
    assert (caplog.records, capfd.readouterr().err) == ([], "")


@without_tensorrt
def test_auto_skips_tensorrt_without_pycuda(monkeypatch):
    tensorrt = ModuleType("tensorrt")
    tensorrt.__version__ = "10.3.0"
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt)
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    runtime = choose("auto")
    assert runtime.name == NAME
    assert runtime.reason.startswith("TensorRT cannot be used here (pycuda: ")


def test_specs_of_half_precision_and_fixed_shapes():
    graph = graph_of("relu (float16[2, 3] x) => (float16[2, 3] y) { y = Relu(x) }")
    runner = OnnxRuntimeRunner(serialized(graph), subject="relu")
    assert (runner.inputs, runner.outputs) == ((TensorSpec("x", "FP16", (2, 3)),), (TensorSpec("y", "FP16", (2, 3)),))
