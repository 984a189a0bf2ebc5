"""Cascades whose lean tier computes no numbers for some rows, on ONNX Runtime."""

from __future__ import annotations

import numpy as np

from edge.bundles.programs import CascadeProgram
from edge.programs.program import AUTO, TIER, Cascade, Options
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from tests.support.models import graph_of, serialized


def runner_of(operation: str) -> OnnxRuntimeRunner:
    text = f"tier (float[N, 2] x) => (float[N, 2] logits) {{ logits = {operation}(x) }}"
    return OnnxRuntimeRunner(serialized(graph_of(text)), subject=operation)


def test_a_lean_tier_is_unsure_of_rows_without_numbers() -> None:
    runners = {"full": runner_of("Abs"), "lean": runner_of("Log")}
    program = Cascade(CascadeProgram(lean="lean", full="full", logits="logits", margin=0.5), runners)
    # Sure, an infinity that is, one that is not, NaN, and unsure.
    x = np.array([[1, 9], [0, 1], [0, np.inf], [1, -1], [1, 1]], np.float32)
    computed = program.compute({"x": x}, Options(AUTO))
    assert computed.facts[TIER].tolist() == ["lean", "lean", "full", "full", "full"]
    np.testing.assert_array_equal(computed.outputs["logits"][2:], [[0, np.inf], [1, 1], [1, 1]])
    for runner in runners.values():
        runner.close()
