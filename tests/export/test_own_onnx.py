"""Bundles of own ONNX files: written by the command, served by a server, and refused where they would not serve."""

import json
import re

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from click.testing import CliRunner
from onnx import TensorProto, helper

from edge.bundles.bundle import Bundle
from edge.bundles.expression import tokenize
from edge.errors import GoldenError, UsageError
from edge.launch import running_server
from edge.runtimes.build import load_runner
from export.cli import export
from tests.data.make_broken_bundles import changed_onnx, custom_operator
from tests.support import text_model
from tests.support.models import oracle_onnx, serialized
from tests.support.task_data import invoke

EXPRESSIONS = ("1 + 2", "3 - 4", "-5", "1 - 2 + 3")


def export_own(path, *options, name="own"):
    """Run the command on an ONNX file and return what it prints; its errors are raised."""
    named = ["--name", name] if name else []
    (exported,) = json.loads(invoke(export, path, "--repository", path.parent / "models", "--json", *named, *options))
    return exported


def write(path, data):
    path.write_bytes(data)
    return path


node, FLOAT = helper.make_node, TensorProto.FLOAT


def value(name, shape, datatype=FLOAT):
    return helper.make_tensor_value_info(name, datatype, shape)


def graph(*nodes, x=("batch", 3), y=("batch", 3), opset=17, output="y", datatype=FLOAT, result=None):
    ends = [value("x", x, datatype)], [result or value(output, y, datatype)]
    return serialized(helper.make_graph(nodes, "g", *ends), opset)


def unary(operator, output="y", options=(), **shapes):
    return graph(node(operator, ["x"], [output], **dict(options)), output=output, **shapes)


RELU = unary("Relu")
TOO_MANY_ROWS = graph(node("Concat", ["x", "x"], ["y"], axis=0), y=("twice", 3))
MEAN_OVER_BATCH = graph(node("ReduceMean", ["x"], ["mean"], axes=[0]), node("Sub", ["x", "mean"], ["y"]))
NOISE = graph(node("RandomNormalLike", ["x"], ["n"]), node("Add", ["x", "n"], ["y"]))
SEQUENCE = helper.make_tensor_sequence_value_info("y", FLOAT, ["batch", 3])
OF_SEQUENCES = graph(node("SequenceConstruct", ["x"], ["y"]), result=SEQUENCE)


def test_bundle_with_real_inputs_is_served(tmp_path):
    np.savez(tmp_path / "real.npz", x=tokenize(EXPRESSIONS))
    path = write(tmp_path / "model.onnx", oracle_onnx())
    exported = export_own(path, "--inputs", tmp_path / "real.npz", "--max-batch-size", 16)
    assert (exported["max_batch_size"], exported["golden_rows"]) == (16, 4)
    bundle = Bundle.open(exported["bundle"])
    assert bundle.read("model.onnx") == oracle_onnx()
    assert bundle.golden.outputs["value"].ravel().tolist() == [3, -1, -5, 2]
    assert "real.npz" in bundle.manifest.provenance.data
    serving = running_server([bundle.path], cache=tmp_path / "cache")
    with serving as ready, triton.InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client:
        tensor = triton.InferInput("x", [1, 15], "FP32")
        tensor.set_data_from_numpy(tokenize(["100 - 1"]))
        assert client.infer("own", [tensor]).as_numpy("value").tolist() == [[99]]


def test_random_golden_inputs_are_called_random(tmp_path):
    path = write(tmp_path / "model.onnx", oracle_onnx())
    exported = export_own(path)
    assert (exported["max_batch_size"], exported["golden"], exported["precision"]) == (8, "random", "fp32")
    bundle = Bundle.open(exported["bundle"])
    assert (bundle.manifest.provenance.data, bundle.manifest.provenance.seed) == ("unknown; golden inputs: random", 0)
    load_runner(bundle, "onnxruntime", tmp_path / "cache").runner.close()
    arguments = [str(path), "--repository", str(tmp_path / "models"), "--name", "own", "--replace"]
    shown = CliRunner().invoke(export, arguments, catch_exceptions=False)
    assert "accuracy is not checked" in shown.stderr
    assert "accuracy" not in shown.stdout


def test_model_without_batch(tmp_path):
    path = write(tmp_path / "model.onnx", unary("Relu", x=(1, 3), y=(1, 3)))
    exported = export_own(path)
    assert (exported["max_batch_size"], Bundle.open(exported["bundle"]).manifest.profile) == (0, {})
    with pytest.raises(UsageError, match=r"--max-batch-size: got 4, expected 0, because 'x' of .* shape \[1, 3\]"):
        export_own(path, "--max-batch-size", 4, name="other")


def test_inputs_without_batch_keep_their_own_lengths(tmp_path):
    nodes, inputs = [node("Concat", ["x", "w"], ["y"], axis=0)], [value("x", (2, 3)), value("w", (5, 3))]
    data = serialized(helper.make_graph(nodes, "g", inputs, [value("y", (7, 3))]))
    bundle = Bundle.open(export_own(write(tmp_path / "model.onnx", data))["bundle"])
    load_runner(bundle, "onnxruntime", tmp_path / "cache").runner.close()


def test_missing_shapes_are_suggested_one_by_one(tmp_path):
    path = write(tmp_path / "model.onnx", text_model.model("full"))
    options = []
    for name in ("input_ids", "attention_mask"):
        with pytest.raises(UsageError, match=f"--shape for input '{name}' .* got nothing") as caught:
            export_own(path, *options)
        (suggestion,) = re.findall(r"--shape (\S+=[\dx:]+)\.", caught.value.fix)
        options += ["--shape", suggestion]
    bundle = Bundle.open(export_own(path, *options)["bundle"])
    assert (bundle.manifest.profile["input_ids"].max, bundle.golden.inputs["input_ids"].shape) == ((8, 64), (8, 16))


def test_weights_beside_the_file_are_put_inside(tmp_path):
    path = tmp_path / "model.onnx"
    model = onnx.load_from_string(oracle_onnx())
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    np.savez(tmp_path / "real.npz", x=tokenize(EXPRESSIONS))
    bundle = Bundle.open(export_own(path, "--inputs", tmp_path / "real.npz")["bundle"])
    assert bundle.golden.outputs["value"].ravel().tolist() == [3, -1, -5, 2]
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(UsageError, match="files with its weights belong beside it"):
        export_own(path, name="other")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no model", r"expected an ONNX model\. Give the file"),
        (unary("Relu", opset=21), r"opset of .*: got 21, expected 13 to 20.* opset_version=18"),
        (unary("Relu", opset=12), "opset of .*: got 12, expected 13 to 20"),
        (changed_onnx(custom_operator), "expected an ONNX model that ONNX Runtime .* standard operators"),
        (OF_SEQUENCES, r"output 'y' of .*: got 'seq\(tensor\(float\)\)', expected a tensor of .*zipmap"),
        (unary("Relu", output="495"), "name of output '495' .*: got '495', .* output_names"),
        (unary("ReduceSum", options={"keepdims": 0}, y=()), r"shape of output 'y' .*: got \[\], expected 1 to 8"),
        (unary("Identity", datatype=TensorProto.STRING), "golden input 'x': got text, expected numbers. Give --inputs"),
        (unary("Log"), "output 'y' .*: got NaN or Inf, expected finite values. Give real inputs with --inputs"),
        (MEAN_OVER_BATCH, "for a row alone and beside another one: got a difference of"),
        (TOO_MANY_ROWS, "output 'y' .*: got 16 rows, expected 8, as sent. Give --max-batch-size 0"),
        (NOISE, "for the same inputs: got a largest difference of .* evaluation mode"),
    ],
)
def test_models_that_would_not_serve(tmp_path, data, message):
    with pytest.raises(GoldenError if data == NOISE else UsageError, match=message):
        export_own(write(tmp_path / "model.onnx", data))
    assert not (tmp_path / "models").exists()


ROWS = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"z": ROWS}, r"names in --inputs .*: got \['z'\], expected exactly \['x'\]"),
        ({"x": ROWS.astype(np.float64)}, r"array 'x' .*: got 'FP64', expected FP32. Convert it with .astype\('float32"),
        ({"x": ROWS[:, :2]}, r"array 'x' .*: got \[2, 2\], expected a shape that fits \[-1, 3\]"),
        ({"x": ROWS * np.float32("nan")}, "array 'x' .*: got NaN or Inf, expected finite values"),
        ({"x": np.array([[{}] * 3])}, "expected an .npz without pickles"),
    ],
)
def test_golden_inputs_that_do_not_fit(tmp_path, arrays, message):
    np.savez(tmp_path / "in.npz", **arrays)
    with pytest.raises(UsageError, match=message):
        export_own(write(tmp_path / "model.onnx", RELU), "--inputs", tmp_path / "in.npz")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "x"], "--shape: got 'x', expected INPUT=MIN:OPT:MAX"),
        (["--shape", "x=1x3:0x3:8x3"], "--shape: got 'x=1x3:0x3:8x3', expected INPUT=MIN:OPT:MAX"),
        (["--shape", "z=1x3:1x3:8x3"], r"--shape: got 'z', expected .* one of \['x'\]"),
        (["--shape", "x=1x3:1x3:8x4"], r"--shape for input 'x': .* expected shapes that fit \[-1, 3\]"),
        (["--shape", "x=4x3:1x3:8x3"], "expected min <= opt <= max"),
        (["--shape", "x=1x3:1x3:4x3"], r"got \(4, 3\), expected 8 rows in max, the --max-batch-size"),
        (["--shape", "x=1x3:1x3:8x3"] * 2, "expected one --shape for 'x'"),
        (["--inputs", "none.npz"], "--inputs none.npz: got No such file or directory, expected an .npz"),
    ],
)
def test_options_that_do_not_fit(tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        export_own(write(tmp_path / "model.onnx", RELU), *options)


@pytest.mark.parametrize("name", [None, "../up"])
def test_name_that_no_model_can_have(tmp_path, name):
    with pytest.raises(UsageError, match=r"--name: got .*, expected lower-case letters.* such as my-model"):
        export_own(write(tmp_path / "model.onnx", RELU), name=name)


def test_runs_and_own_files_do_not_mix(tmp_path):
    path = write(tmp_path / "model.onnx", RELU)
    with pytest.raises(UsageError, match="expected one ONNX file, or run directories alone"):
        export_own(path, path)
    with pytest.raises(UsageError, match=r"expected an ONNX file \(.onnx\) with --max-batch-size, --shape or --inputs"):
        export_own(tmp_path / "run", "--max-batch-size", 4)


def test_text_in_and_out(tmp_path):
    number = node("Cast", ["x"], ["number"], to=TensorProto.INT64)  # fails on text that is not a number
    text = node("Cast", ["number"], ["y"], to=TensorProto.STRING)
    data = graph(number, text, x=("batch", 1), y=("batch", 1), datatype=TensorProto.STRING)
    model = write(tmp_path / "text.onnx", data)
    np.savez(tmp_path / "inputs.npz", x=np.array([["12"], ["7"]]))
    bundle = Bundle.open(export_own(model, "--inputs", tmp_path / "inputs.npz")["bundle"])
    assert bundle.golden.outputs["y"].ravel().tolist() == [b"12", b"7"]
    load_runner(bundle, "onnxruntime", tmp_path / "cache").runner.close()
