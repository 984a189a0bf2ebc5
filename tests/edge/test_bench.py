"""``fewheads bench``: the closed loop, in process and served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import mistake, shown
from tests.support.models import ORACLE, ORACLE_BUNDLE


def test_bench_in_process_and_served(url: str) -> None:
    (report,) = json.loads(shown("bench", ORACLE_BUNDLE, "--requests", 50, "--json"))
    assert (report["model"], report["rows"], report["concurrency"]) == (ORACLE, 1, 1)
    for side in ("in_process", "served"):
        assert report[side]["count"] == 50
        assert 0 < report[side]["p50_ms"] <= report[side]["p95_ms"] <= report[side]["p99_ms"]
        assert report[side]["per_second"] > 0
    assert report["overhead_ratio"] == pytest.approx(report["served"]["p50_ms"] / report["in_process"]["p50_ms"])
    arguments = ("--requests", 60, "--rows", 3, "--concurrency", 2)
    before = requests_of(url)
    text = shown("bench", ORACLE_BUNDLE, "--url", url, *arguments)
    assert all(word in text for word in ("in process", "served", "ratio", ORACLE))
    assert requests_of(url) - before == 60 + 6  # a tenth of them before, to warm up
    line = mistake("bench", ORACLE_BUNDLE, "--url", url, "--requests", 10, "--rows", 65, code=7)
    assert "got 65 rows, expected at most 64" in line


def test_bench_without_the_bundle(url: str, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("1 + 1\n2 - 3\n")
    run = ("bench", "--url", url, "--requests", 20, "--json")
    for arguments in ((ORACLE,), (ORACLE, "--texts", tmp_path / "texts", "--rows", 2), ("echo-int64", "--rows", 3)):
        (report,) = json.loads(shown(*run, *arguments))
        assert (report["model"], report["in_process"], report["overhead_ratio"]) == (arguments[0], None, None)
        assert report["served"]["count"] == 20
    expected = "inputs of echo-bytes: got in_bytes BYTES [-1], expected numbers of a fixed shape. Give lines"
    assert expected in mistake(*run, "echo-bytes")
    assert "got 'zz', expected a bundle directory" in mistake(*run, "zz", "--rate", 10)
    expected = f"--texts: got bundle {ORACLE_BUNDLE}, expected names of models at --url"
    assert expected in mistake(*run, ORACLE_BUNDLE, "--texts", tmp_path / "texts")
    assert "NOT_FOUND" in mistake(*run, "zz", code=7)


def requests_of(url: str) -> int:
    latency = json.loads(shown("info", "--url", url, "--json"))["latency"]
    return int(latency[f"{ORACLE}:1"]["request"]["count"])
