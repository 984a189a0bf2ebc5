import sys

import pytest

from edge.errors import UsageError
from edge.profiling.table import Comparison
from export.reduction.plan import LayerPlan
from export.reduction.plot import draw
from export.reduction.reduce import LayerReport
from export.reduction.run import Reduced
from export.runs import RunMetrics
from export.transformer import LayerShape


def make_reduced():
    """What a reduction of two layers returns, the second without attention."""
    shapes = LayerShape(9, 16, 1152), LayerShape(0, 0, 64)
    layers = tuple(LayerReport(LayerPlan(shape), 0.01, 0.1, 0.12, 0.2, 0.22) for shape in shapes)
    metrics = RunMetrics(1000, 0, 0, 1.0, ())
    dense = LayerShape(12, 32, 1536)
    return Reduced(
        "runs/half", 32, 2.0, Comparison(1.0, 1.9, 1.9, 60), 2.3, dense, layers, metrics, {"device": "here"}, "measured"
    )


def test_the_figure_shows_sizes_and_errors(tmp_path):
    pytest.importorskip("matplotlib")
    draw(make_reduced(), tmp_path / "half.svg")
    # Text is drawn as outlines, with itself in a comment.
    drawn = (tmp_path / "half.svg").read_text()
    for text in ("heads of 12", "width of 32", "units of 1536", "1152", "16", "9", "64", "attention's output"):
        assert f"<!-- {text} -->" in drawn, text
    assert "half: 1.90 times faster at 32 tokens, 2.30 at most" in drawn
    draw(make_reduced(), tmp_path / "half.png")
    assert (tmp_path / "half.png").read_bytes().startswith(b"\x89PNG")


def test_figures_that_cannot_be_written_are_rejected(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match=r"expected a file to write\. Choose another place"):
        draw(make_reduced(), tmp_path / "half.nonsense")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"half\.png: got .*expected a file to write"):
        draw(make_reduced(), tmp_path / "file" / "half.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"got no matplotlib, expected matplotlib.*fewheads\[plot\]"):
        draw(make_reduced(), tmp_path / "half.png")
