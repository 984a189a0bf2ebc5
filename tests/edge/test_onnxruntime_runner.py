"""Runner for ONNX Runtime: specs, outputs, tensors that stay on the device, and errors."""

import sys

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge.datatypes import TensorSpec
from edge.errors import BundleError, InvalidRequest, RunnerError
from edge.runtimes.onnxruntime_runner import CPU, CUDA, OnnxRuntimeRunner
from tests.data.make_broken_bundles import changed_onnx, external_data
from tests.support.models import oracle_onnx, serialized
from tests.support.server_models import table_graph, write_echo_bundle


@pytest.fixture
def runner():
    return OnnxRuntimeRunner(oracle_onnx(), subject="oracle")


def test_runner_releases_the_bytes_of_the_file():
    model = oracle_onnx()
    before = sys.getrefcount(model)
    runner = OnnxRuntimeRunner(model, subject="oracle")
    assert sys.getrefcount(model) == before
    runner.close()


def test_external_weights_are_found_in_subgraphs():
    def with_external_branch(model):
        external_data(model)
        branch = helper.make_graph(
            [helper.make_node("Identity", ["second"], ["chosen"])],
            "branch",
            [],
            [helper.make_tensor_value_info("chosen", TensorProto.FLOAT, [30, 1])],
            [model.graph.initializer.pop(2)],
        )
        node = helper.make_node("If", ["condition"], ["second"], then_branch=branch, else_branch=branch)
        model.graph.node.insert(0, node)

    with pytest.raises(BundleError, match="got external data"):
        OnnxRuntimeRunner(changed_onnx(with_external_branch), subject="oracle")


def test_specs_of_half_precision_and_fixed_shapes():
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT16, [2, 3]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [x], [y])
    runner = OnnxRuntimeRunner(serialized(graph), subject="relu")
    assert (runner.inputs, runner.outputs) == ((TensorSpec("x", "FP16", (2, 3)),), (TensorSpec("y", "FP16", (2, 3)),))


WIDTH = 6


def recurrent_onnx():
    """One step: x and state [batch, 6] to next = tanh(x @ wx + state @ ws) [batch, 6] and y = next @ wy [batch, 2]."""
    random = np.random.default_rng(0)
    weights = {"wx": (WIDTH, WIDTH), "ws": (WIDTH, WIDTH), "wy": (WIDTH, 2)}
    nodes = [("MatMul", "x wx", "a"), ("MatMul", "state ws", "b"), ("Add", "a b", "c"), ("Tanh", "c", "next")]
    nodes.append(("MatMul", "next wy", "y"))
    made = [helper.make_node(kind, inputs.split(), [output]) for kind, inputs, output in nodes]
    widths = {"x": WIDTH, "state": WIDTH, "y": 2, "next": WIDTH}
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width]) for name, width in widths.items()]
    arrays = [numpy_helper.from_array(random.normal(size=of).astype(np.float32), name) for name, of in weights.items()]
    return serialized(helper.make_graph(made, "recurrent", infos[:2], infos[2:], arrays))


@pytest.fixture
def recurrent():
    return OnnxRuntimeRunner(recurrent_onnx(), subject="recurrent")


@pytest.mark.parametrize("cuda", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_loop_with_handles_equals_one_with_arrays(cuda):
    if cuda and CUDA[0][0] not in onnxruntime.get_available_providers():
        pytest.skip("needs onnxruntime-gpu")
    runner = OnnxRuntimeRunner(recurrent_onnx(), subject="recurrent", providers=CUDA if cuda else CPU)
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
    nodes = [helper.make_node("MatMul", ["a", "b"], ["y"])]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["m", "n"]) for name in "aby"]
    runner = OnnxRuntimeRunner(serialized(helper.make_graph(nodes, "product", infos[:2], infos[2:])), subject="product")
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
    node = helper.make_node("EmbedLayerNormalization", ["ids", "", "words", "places", "", "ones", "ones"], ["y", "z"])
    node.domain = "com.microsoft"
    tensors = [
        numpy_helper.from_array(np.ones(shape, np.float32), name)
        for name, shape in (("words", (9, 4)), ("places", (9, 4)), ("ones", (4,)))
    ]
    infos = [
        helper.make_tensor_value_info("ids", TensorProto.INT32, [1, 1]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, 4]),
    ]
    graph = helper.make_graph([node], "g", infos[:1], infos[1:], tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    with pytest.raises(InvalidRequest, match="got an index outside its table, expected values inside"):
        OnnxRuntimeRunner(model, subject="bert").infer({"ids": np.array([[9]], np.int32)})
    assert (caplog.records, capfd.readouterr().err) == ([], "")
