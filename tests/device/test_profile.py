"""``fewheads profile`` with TensorRT."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pycuda", reason="run `make test-device`", exc_type=ImportError)
pytest.importorskip("tensorrt")

from edge.bench.profile import profile
from edge.runtimes.tensorrt.runtime import TensorRt
from tests.support.layer_shapes import LENGTHS, SHAPES, write_layer_shapes


def test_profile_times_every_shape_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorRt, "isolated_build", False)  # a child process for each shape would take seconds
    directory, out = write_layer_shapes(tmp_path / "shapes"), tmp_path / "table.json"
    options = {"target": "tensorrt", "calls": 3, "cache": tmp_path / "cache"}
    table = profile(directory, out, **options)
    assert (table.key["runtime"], table.key["provider"], table.key["precision"]) == ("tensorrt", "GPU", "fp32")
    assert {(timing.shape, timing.tokens) for timing in table.timings} == {(s, n) for s in SHAPES for n in LENGTHS}
    assert {rest.tokens for rest in table.rest} == set(LENGTHS)
    steps: list[str] = []
    assert profile(directory, out, on_progress=lambda *now: steps.append(now[-1]), **options) == table
    assert not steps
