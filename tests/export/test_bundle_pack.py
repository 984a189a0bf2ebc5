"""Bundles of a user's ONNX files: written by the command, served, and refused where they would not serve."""

import os
import re
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edge.bundles.bundle import Bundle
from edge.bundles.expression import tokenize
from edge.cli.info import info
from edge.errors import GoldenError, UsageError
from edge.runtimes.build import load_runner
from export.cli.export import export
from export.cli.pack import pack
from tests.data.make_broken_bundles import changed_onnx, custom_operator
from tests.support import text_model
from tests.support.models import oracle_onnx, serialized
from tests.support.onnx_graphs import FLOAT, constant, model_of, node, packed, value, write
from tests.support.sample_requests import column
from tests.support.stock_client import served_bundles
from tests.support.task_data import finished, invoke

EXPRESSIONS = ("1 + 2", "3 - 4", "-5", "1 - 2 + 3")


def graph(*nodes, x=("batch", 3), y=("batch", 3), opset=17, output="y", datatype=FLOAT, result=None):
    ends = [value("x", x, datatype)], [result or value(output, y, datatype)]
    return serialized(helper.make_graph(nodes, "g", *ends), opset)


def unary(operator, output="y", options=(), **shapes):
    return graph(node(operator, ["x"], [output], **dict(options)), output=output, **shapes)


def misnamed_operator(model):
    model.graph.node[1].op_type = "Frobnicate"


RELU = unary("Relu")
TOO_MANY_ROWS = graph(node("Concat", ["x", "x"], ["y"], axis=0), y=("twice", 3))
MEAN_OVER_BATCH = graph(node("ReduceMean", ["x"], ["mean"], axes=[0]), node("Sub", ["x", "mean"], ["y"]))
NOISE = graph(node("RandomNormalLike", ["x"], ["n"]), node("Add", ["x", "n"], ["y"]))
WITHOUT_STANDARD = helper.make_model(
    helper.make_graph(
        [node("Gelu", ["x"], ["y"], domain="com.microsoft")], "g", [value("x", (1, 3))], [value("y", (1, 3))]
    ),
    opset_imports=[helper.make_opsetid("com.microsoft", 1)],
).SerializeToString()


def beside_large(scores):
    """Return a model whose small output must be checked by its own size, not by that of a large one beside it."""
    nodes = [node("ReduceMean", ["x"], ["mean"], axes=[0]), scores, node("Mul", ["x", "large"], ["boxes"])]
    outputs = [value("boxes", ("batch", 3)), value("scores", ("batch", 3))]
    return model_of(nodes, [value("x", ("batch", 3))], outputs, [constant("large", np.float32(1e5))])


SMALL_NOISE = beside_large(node("RandomNormalLike", ["x"], ["scores"]))
SEQUENCE = helper.make_tensor_sequence_value_info("y", FLOAT, ["batch", 3])
OF_SEQUENCES = graph(node("SequenceConstruct", ["x"], ["y"]), result=SEQUENCE)


def test_bundle_with_real_inputs_is_served(tmp_path):
    np.savez(tmp_path / "real.npz", x=tokenize(EXPRESSIONS))
    path = write(tmp_path / "model.onnx", oracle_onnx())
    written = packed(path, "--inputs", tmp_path / "real.npz", "--max-batch-size", 16)
    assert (written["max_batch_size"], written["golden_rows"]) == (16, 4)
    bundle = Bundle.open(written["bundle"])
    assert bundle.read("model.onnx") == oracle_onnx()
    assert bundle.golden.outputs["value"].ravel().tolist() == [3, -1, -5, 2]
    assert "real.npz" in bundle.manifest.provenance.data
    latencies = bundle.manifest.tiers[0].latencies
    assert [(one.device, one.precision, one.rows, one.part) for one in latencies] == [
        ("Jetson Orin Nano Super", "fp32", rows, None) for rows in (1, 8)
    ]
    last = invoke(info, bundle.path).splitlines()[-1]
    assert re.fullmatch("made .* by the owner of model.onnx, .* golden inputs: real.npz", last), "no seed, no commit"
    with served_bundles([bundle.path], tmp_path / "cache") as ask:
        assert ask("own", {"x": tokenize(["100 - 1"])})["value"].tolist() == [[99]]


def test_random_golden_inputs_are_called_random(tmp_path):
    path = write(tmp_path / "model.onnx", oracle_onnx())
    written = packed(path)
    assert (written["max_batch_size"], written["golden"], len(written["files"])) == (8, "random", 1)
    bundle = Bundle.open(written["bundle"])
    made = bundle.manifest.provenance
    assert (made.data, made.seed) == ("data that the file does not name; golden inputs: random", 0)
    load_runner(bundle, "onnxruntime", tmp_path / "cache").runner.close()
    shown = finished(pack, path, "--repository", tmp_path / "models", "--name", "own", "--replace")
    assert "accuracy is not checked" in shown.stderr
    assert "accuracy" not in shown.stdout


def test_model_without_batch(tmp_path):
    path = write(tmp_path / "model.onnx", unary("Relu", x=(1, 3), y=(1, 3)))
    written = packed(path)
    assert (written["max_batch_size"], Bundle.open(written["bundle"]).manifest.profile) == (0, {})
    with pytest.raises(UsageError, match=r"--max-batch-size: got 4, expected 0, because 'x' of .* shape \[1, 3\]"):
        packed(path, "--max-batch-size", 4, name="other")


def test_inputs_without_batch_keep_their_own_lengths(tmp_path):
    nodes = [node("Concat", ["x", "w"], ["all"], axis=0), node("MatMul", ["all", "weight"], ["y"])]
    weight = constant("weight", np.eye(3, dtype=np.float32))
    data = model_of(nodes, [value("x", (2, 3)), value("w", (5, 3))], [value("y", (7, 3))], [weight])
    bundle = Bundle.open(packed(write(tmp_path / "model.onnx", data), "--int8")["bundle"])
    for tier in bundle.manifest.tiers:
        load_runner(bundle, "onnxruntime", tmp_path / "cache", tier=tier.name).runner.close()


def test_dynamic_dimensions_are_asked_for_by_name_with_options_to_copy(tmp_path):
    model = onnx.load_from_string(text_model.model("full"))
    for tensor in model.graph.input:
        tensor.type.tensor_type.shape.dim[1].dim_param = f"length_of_{tensor.name}"
    path = write(tmp_path / "model.onnx", model.SerializeToString())
    asked = r"length_of_input_ids of input 'input_ids' \[\w+, length_of_input_ids\] and length_of_attention_mask"
    with pytest.raises(
        UsageError, match=f"--shape: got nothing, expected the smallest, usual and largest {asked}"
    ) as it:
        packed(path)
    options = re.findall(r"--shape \S+=[\dx:]+", it.value.fix)
    bundle = Bundle.open(packed(path, *" ".join(options).split())["bundle"])
    assert (bundle.manifest.profile["input_ids"].max, bundle.golden.inputs["input_ids"].shape) == ((8, 64), (8, 16))


def branching():
    """Return a model whose weights are those of the branches of an If."""
    branches = []
    for name, number in (("one", 1.0), ("two", 2.0)):
        weight = helper.make_tensor(name, FLOAT, [1], np.array([number], np.float32).tobytes(), raw=True)
        made = [node("Mul", ["x", name], [f"{name}_times"])]
        branches.append(helper.make_graph(made, name, [], [value(f"{name}_times", (2, 3))], [weight]))
    nodes = [
        node("ReduceSum", ["x"], ["sum"], keepdims=0),
        node("Cast", ["sum"], ["nonzero"], to=TensorProto.BOOL),
        node("If", ["nonzero"], ["y"], then_branch=branches[1], else_branch=branches[0]),
    ]
    return graph(*nodes, x=(2, 3), y=(2, 3))


@pytest.mark.parametrize(
    ("data", "inputs", "output", "wanted"),
    [
        (oracle_onnx(), tokenize(EXPRESSIONS), "value", [[3], [-1], [-5], [2]]),
        (branching(), np.ones((2, 3), np.float32), "y", [[2, 2, 2]] * 2),
    ],
    ids=["graph", "branches"],
)
def test_weights_beside_the_file_are_put_inside(data, inputs, output, wanted, tmp_path):
    path = tmp_path / "model.onnx"
    model = onnx.load_from_string(data)
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    np.savez(tmp_path / "real.npz", x=inputs)
    bundle = Bundle.open(packed(path, "--inputs", tmp_path / "real.npz")["bundle"])
    assert bundle.golden.outputs[output].tolist() == wanted
    (tmp_path / "weights.bin").unlink()
    load_runner(bundle, "onnxruntime", tmp_path / "cache").runner.close()
    with pytest.raises(UsageError, match=r"weights of .*: got no file weights.bin in .* Copy these files beside"):
        packed(path, name="other")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no model", r"expected an ONNX model\. Give the .onnx file"),
        (b"", "got no graph with nodes, expected an ONNX model"),
        (changed_onnx(custom_operator), "operators of .*: got com.example.Frobnicate, expected operators of ONNX"),
        (changed_onnx(misnamed_operator), "operators of .*: got Frobnicate, expected operators of ONNX"),
        (OF_SEQUENCES, r"output 'y' of .*: got 'seq\(tensor\(float\)\)', expected a tensor of .*zipmap"),
        (unary("Relu", output="495"), "name of output '495' .*: got '495', .* output_names"),
        (unary("ReduceSum", options={"keepdims": 0}, y=()), r"shape of output 'y' .*: got \[\], expected 1 to 8"),
        (unary("Identity", datatype=TensorProto.STRING), "golden input 'x': got text, expected numbers. Give --inputs"),
        (unary("Log"), r"output 'y' .*: got NaN or Inf, expected finite values\. Give real inputs with --inputs\.$"),
        (WITHOUT_STANDARD, r"opset of .*: got none of the ONNX standard, expected 13 to 20, .*opset_version=18\.$"),
        (MEAN_OVER_BATCH, "for a row alone and beside another one: got a largest difference of"),
        (TOO_MANY_ROWS, "output 'y' .*: got 16 rows, expected 8, as sent. Give --max-batch-size 0"),
        (NOISE, "for the same inputs: got a largest difference of .* evaluation mode"),
        (beside_large(node("Sub", ["x", "mean"], ["scores"])), "output 'scores' .* beside another one: got a largest"),
        (SMALL_NOISE, "output 'scores' .* for the same inputs: got a largest difference"),
    ],
)
def test_models_that_would_not_serve(tmp_path, data, message):
    with pytest.raises(GoldenError if data in (NOISE, SMALL_NOISE) else UsageError, match=message):
        packed(write(tmp_path / "model.onnx", data))
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("opset", [12, 22])
def test_another_opset_is_converted_by_the_command_in_the_error(tmp_path, opset):
    (tmp_path / "its place").mkdir()
    path = write(tmp_path / "its place" / "model.onnx", unary("Relu", opset=opset))
    with pytest.raises(UsageError, match=rf"opset of .*: got {opset}, expected 13 to 20") as caught:
        packed(path)
    (command,) = re.findall(r'python -c "(.+)"', caught.value.fix)
    subprocess.run([sys.executable, "-c", command], check=True)
    bundle = Bundle.open(packed(path.with_name("model-opset18.onnx"))["bundle"])
    assert bundle.artifact("onnxruntime").opset == 18


def test_more_than_2_gib_is_refused_before_it_is_read(tmp_path):
    message = r"size of .*: got 2\.\d\d GiB, expected less than 2 GiB with all weights.* Export the model in FP16"
    large = write(tmp_path / "large.onnx", b"")
    os.truncate(large, 2**31)  # a sparse file, which takes no room
    with pytest.raises(UsageError, match=message):
        packed(large)
    path, model = tmp_path / "model.onnx", onnx.load_from_string(oracle_onnx())
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    os.truncate(tmp_path / "weights.bin", 2**31)
    with pytest.raises(UsageError, match=message):
        packed(path)


ROWS = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"z": ROWS}, r"names in --inputs .*: got \['z'\], expected exactly \['x'\]"),
        ({"x": ROWS.astype(np.float64)}, r"array 'x' .*: got 'FP64', expected FP32. Convert it with .astype\('float32"),
        ({"x": ROWS[:, :2]}, r"array 'x' .*: got \[2, 2\], expected a shape that fits \[-1, 3\].* Reshape it\.$"),
        ({"x": ROWS * np.float32("nan")}, "array 'x' .*: got NaN or Inf, expected finite values"),
        ({"x": np.array([[{}] * 3])}, "expected an .npz without pickles"),
        (ROWS, r"in\.npy: got another format, .* numpy\.savez\('in\.npz', x=…\)"),
        ({"x": -1 - ROWS}, "expected finite values. Give other inputs with --inputs, or correct the model"),
    ],
)
def test_golden_inputs_that_do_not_fit(tmp_path, arrays, message):
    path = tmp_path / ("in.npz" if isinstance(arrays, dict) else "in.npy")
    np.savez(path, **arrays) if isinstance(arrays, dict) else np.save(path, arrays)
    with pytest.raises(UsageError, match=message):
        packed(write(tmp_path / "model.onnx", unary("Log")), "--inputs", path)


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
        (["--name", "../up"], "--name: got '../up', expected lower-case letters.* such as my-model"),
        ([], "--name: got nothing, expected lower-case letters.* such as my-model"),
    ],
)
def test_options_that_do_not_fit(tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        packed(
            write(tmp_path / "model.onnx", RELU), *options, name="own" if options and "--name" not in options else None
        )


def test_export_refers_to_pack(tmp_path):
    path = write(tmp_path / "model.onnx", RELU)
    with pytest.raises(UsageError, match=r"RUN_DIR: got .*model.onnx', expected run directories.* 'fewheads pack .*"):
        invoke(export, path, "--repository", tmp_path)


def test_text_in_and_out(tmp_path):
    number = node("Cast", ["x"], ["number"], to=TensorProto.INT64)  # fails on text that is not a number
    text = node("Cast", ["number"], ["y"], to=TensorProto.STRING)
    data = graph(number, text, x=("batch", 1), y=("batch", 1), datatype=TensorProto.STRING)
    model = write(tmp_path / "text.onnx", data)
    np.savez(tmp_path / "inputs.npz", x=np.array([["12"], ["7"]]))
    bundle = Bundle.open(packed(model, "--inputs", tmp_path / "inputs.npz")["bundle"])
    assert bundle.golden.outputs["y"].ravel().tolist() == [b"12", b"7"]
    with served_bundles([bundle.path], tmp_path / "cache") as ask:
        assert ask("own", {"x": column("0345")})["y"].tolist() == [[b"345"]]
