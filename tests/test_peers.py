"""The comparison with other servers, without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PEERS = Path(__file__).parent.parent / "deploy" / "peers"


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FEWHEADS_PEERS": str(home)}
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)


def test_without_peers_it_says_how_to_get_them(tmp_path: Path) -> None:
    done = run(tmp_path, sys.executable, str(PEERS / "compare.py"), f"--out={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "not installed: MLServer: deploy/peers/install.sh mlserver" in lines
    assert all(line.startswith("not installed: ") for line in lines)
    assert not list(tmp_path.iterdir())


def test_an_unknown_peer_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, str(PEERS / "install.sh"), "zz")
    assert done.returncode == 2
    assert "zz: unknown" in done.stderr


def test_medians_ratios_and_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PEERS))
    import report

    def cell(server: str, p50_us: float, foreign_cores: float = 0.0) -> dict[str, Any]:
        place = {"model": "mlp", "client": "h2load", "concurrency": 1, "day": "2026-01-01"}
        figures = {"p99_us": 9.0, "per_second": 1.0, "cpu_us": 1.0, "foreign_cores": foreign_cores}
        return {"server": server, "version": "", "p50_us": p50_us, **place, **figures}

    start = {"server": "fewheads, default", "version": "", "day": "2026-01-01", "ready_s": 1.0}
    start |= {"rss_mb": 90.0, "pss_mb": 50.0, "processes": 1}
    records = [
        start,
        cell("fewheads, default", 100),
        cell("fewheads, default", 120),
        cell("fewheads, default", 900, 1.5),
        cell("other", 330, 1.0),
    ]
    results = report.summarise(records, {"cpu": "one"})
    assert {c["server"]: (c["p50_us"], c["ratio"]) for c in results["cells"]} == {
        "fewheads, default": (110, 1),
        "other": (330, 3),
    }
    page = report.markdown(results)
    assert "| other | 330 (3.00)* |" in page
    assert "| fewheads, default | 110 (1.00) |" in page
    assert "| fewheads, default |  | 1.00 | 1 | 90 | 50 | 1 |" in page


def test_the_published_page_shows_the_published_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PEERS))
    import report

    results = json.loads((PEERS / "results.json").read_text())
    assert (PEERS / "RESULTS.md").read_text().endswith(report.markdown(results))


@pytest.mark.slow
def test_it_measures_a_server_that_is_always_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--only=bare", "--repetitions=1", "--seconds=0.1", f"--out={out}"]
    done = run(tmp_path, sys.executable, str(PEERS / "compare.py"), *arguments)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stdout
    assert (out / "results.md").read_text().count("| bare grpcio, 4 threads |") == 5
