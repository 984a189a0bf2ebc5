"""ONNX Runtime: specs, values, and the refusals."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from edge.datatypes import TensorSpec
from edge.errors import BackendError, BundleError, RunnerError
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from tests.data.make_broken_bundles import changed_onnx, external_data
from tests.edge.models import oracle_golden, oracle_onnx, serialized


@pytest.fixture
def runner() -> OnnxRuntimeRunner:
    return OnnxRuntimeRunner(oracle_onnx(), subject="oracle")


def test_specs(runner: OnnxRuntimeRunner):
    assert runner.inputs == (TensorSpec("x", "FP32", (-1, 15)),)
    assert runner.outputs == (TensorSpec("value", "FP32", (-1, 1)),)
    assert (runner.platform, runner.device) == ("onnxruntime_onnx", "CPU")


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_oracle_is_exact(runner: OnnxRuntimeRunner, rows: int):
    golden = oracle_golden()
    got = runner.infer({"x": golden.inputs["x"][:rows]})
    np.testing.assert_array_equal(got["value"], golden.outputs["value"][:rows])


def test_answers_belong_to_the_caller(runner: OnnxRuntimeRunner):
    inputs = oracle_golden().inputs
    first = runner.infer(inputs)["value"]
    kept = first.copy()
    runner.infer({"x": inputs["x"][::-1].copy()})
    np.testing.assert_array_equal(first, kept)


def test_optimized_graph_computes_the_same(tmp_path: Path):
    path = tmp_path / "optimized.onnx"
    OnnxRuntimeRunner(oracle_onnx(), subject="oracle", optimized_path=str(path)).close()
    golden = oracle_golden()
    got = OnnxRuntimeRunner(path.read_bytes(), subject="oracle").infer(golden.inputs)
    np.testing.assert_array_equal(got["value"], golden.outputs["value"])


def test_the_file_is_not_kept_beside_the_weights():
    model = oracle_onnx()
    before = sys.getrefcount(model)
    runner = OnnxRuntimeRunner(model, subject="oracle")
    assert sys.getrefcount(model) == before
    runner.close()


def test_runtime_failure_hides_its_text(runner: OnnxRuntimeRunner, caplog: pytest.LogCaptureFixture):
    with pytest.raises(RunnerError, match=r"oracle: got InvalidArgument, expected an answer") as caught:
        runner.infer({"x": np.zeros((1, 14), np.float32)})
    assert "14" not in str(caught.value)
    assert "Expected: 15" in caplog.text


def test_closed_runner_does_not_answer(runner: OnnxRuntimeRunner):
    runner.close()
    with pytest.raises(RunnerError):
        runner.infer(oracle_golden().inputs)


@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this one has CUDA")
def test_missing_cuda_provider():
    with pytest.raises(BackendError, match=r"CUDAExecutionProvider: got .*Install the extra 'cuda'"):
        OnnxRuntimeRunner(oracle_onnx(), subject="oracle", cuda=True)


def test_weights_in_another_file_are_refused_though_the_file_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "weights.bin").write_bytes(bytes(30 * 4))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BundleError, match="oracle: got external data, expected all weights in the ONNX file"):
        OnnxRuntimeRunner(changed_onnx(external_data), subject="oracle")


def test_weights_in_another_file_are_found_in_subgraphs():
    def with_external_branch(model: onnx.ModelProto) -> None:
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


def test_half_precision_and_fixed_shapes_are_told():
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "relu",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, [2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, [2, 3])],
    )
    runner = OnnxRuntimeRunner(serialized(graph), subject="relu")
    assert runner.inputs == (TensorSpec("x", "FP16", (2, 3)),)
    assert runner.outputs == (TensorSpec("y", "FP16", (2, 3)),)
