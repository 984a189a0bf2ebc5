"""The table of runtimes: choosing one, adding one, and the simulated accelerator."""

import sys
import time
from importlib.util import find_spec
from types import ModuleType

import msgspec
import numpy as np
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from edge.bundles.bundle import Bundle, write_bundle
from edge.bundles.manifest import Artifact, Profile, Tier, Tolerance
from edge.cli.build import build as build_command
from edge.errors import BackendError, BundleError, UsageError
from edge.runtimes import cuda
from edge.runtimes.build import load_runner
from edge.runtimes.cuda import DeviceFacts
from edge.runtimes.onnxruntime import OnnxRuntimeTensorRt
from edge.runtimes.onnxruntime_runner import CUDA as CUDA_PROVIDERS
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from edge.runtimes.runtime import BuildOptions, Source
from edge.runtimes.table import RUNTIMES, choose, targets
from edge.runtimes.tensorrt import package
from tests.support.commands import fewheads, refusal
from tests.support.letters_model import MAX_BATCH_SIZE, write_letters_bundle
from tests.support.marks import with_rtx
from tests.support.models import ORACLE_BUNDLE, oracle_golden, oracle_manifest, serialized

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


@without_tensorrt
def test_auto_skips_tensorrt_without_pycuda(monkeypatch):
    tensorrt = ModuleType("tensorrt")
    tensorrt.__version__ = "10.3.0"
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt)
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    runtime = choose("auto")
    assert runtime.name == NAME
    assert runtime.reason.startswith("TensorRT cannot be used here (pycuda: ")


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


def test_help_lists_the_table():
    shown = " ".join(CliRunner().invoke(build_command, ["--help"], terminal_width=200).output.split())
    for runtime in RUNTIMES.values():
        assert runtime.target() in shown


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
    nodes = [helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "scale", "zero"])]
    x, y = (helper.make_tensor_value_info(n, t, [4]) for n, t in (("x", TensorProto.FLOAT), ("y", TensorProto.UINT8)))
    model = serialized(helper.make_graph(nodes, "dynamic", [x], [y]))
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
    assert "--instances: got 2, expected 1 on a GPU" in refusal(fewheads(*arguments), 2)


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
