"""``fewheads info``: bundles, and the models of a server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from edge.bundles.manifest import schema
from tests.data.make_broken_bundles import MEASURED, PREDICTION, Good
from tests.support.commands import fewheads, mistake, refusal, shown
from tests.support.models import ORACLE, ORACLE_BUNDLE, write_bundle_of_roles


def test_info_shows_bundles(tmp_path: Path) -> None:
    text = shown("info", ORACLE_BUNDLE, write_bundle_of_roles(tmp_path / "oracle").path)
    assert text.startswith(f"calculator-oracle version 1 in {ORACLE_BUNDLE}\n")
    for cells in (
        ("input", "x", "FP32", "[-1, 15]"),
        ("output", "value", "FP32", "[-1, 1]"),
        ("full", "model.onnx"),
        ("output of embed.onnx", "code"),
        ("input of head.onnx", "code", "[-1, 4]"),
        ("full", "head", "tensorrt"),
    ):
        assert any(all(cell in line for cell in cells) for line in text.splitlines()), cells
    found = json.loads(shown("info", ORACLE_BUNDLE, ORACLE_BUNDLE, "--json"))
    manifest = json.loads((ORACLE_BUNDLE / "manifest.json").read_bytes())
    assert found == [manifest, manifest]
    assert json.loads(shown("info", "--schema")) == json.loads(json.dumps(schema()))


def test_info_labels_predicted_latencies(tmp_path: Path) -> None:
    assert "latency" not in shown("info", ORACLE_BUNDLE)
    for name, content in Good().with_field("tiers.0.latencies", [MEASURED, PREDICTION]).items():
        assert isinstance(content, bytes)
        (tmp_path / name).write_bytes(content)
    lines = shown("info", tmp_path).splitlines()
    assert "calculator-oracle, latency of a run: measured, or a prediction, not measured on an Orin" in lines
    rows = ["|".join(cell.strip() for cell in line.split("│")[1:-1]) for line in lines if line.startswith("│ full")]
    assert rows[-2:] == [
        "full|measured|AMD EPYC|onnxruntime|fp32|1|32|1.25|||1",
        "full|prediction|Jetson Orin Nano Super at 15W|tensorrt|fp16|8||0.5|0.3|0.7|1.5",
    ]
    (found,) = json.loads(shown("info", tmp_path, "--json"))
    assert found["tiers"][0]["latencies"] == [MEASURED, PREDICTION]


def test_info_rejects_broken_and_missing_bundles(tmp_path: Path) -> None:
    shutil.copytree(ORACLE_BUNDLE, tmp_path / "broken")
    (tmp_path / "broken" / "model.onnx").write_bytes(b"broken")
    done = fewheads("info", tmp_path / "broken")
    assert "model.onnx: got 6 bytes" in refusal(done, 3)
    assert len(done.stderr.splitlines()) == 1
    assert "nothing there" in refusal(fewheads("info", tmp_path / "none"), 3)
    assert mistake("info").startswith("BUNDLE: got none")


def test_info_shows_models_and_memory_of_a_server(url: str) -> None:
    found = json.loads(shown("info", "--url", url, "--json"))
    states = {model["name"]: model["state"] for model in found["models"]}
    assert states[ORACLE] == "READY"
    assert states["broken"] == "UNAVAILABLE"
    assert 0 < found["memory_bytes"]["process_rss"] < found["memory_bytes"]["system_total"]
    text = shown("info", "--url", url)
    assert any("broken" in line and "UNAVAILABLE" in line for line in text.splitlines())
