"""The comparison with other servers, run without them, and its published page."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from edge.client.connection import open_stub
from edge.launch import running_server
from tests.support.letters_model import write_letters_bundle
from tests.support.loop_model import ENDLESS, NAME, array_of, loop_request, write_halving_bundle

PEERS = Path(__file__).parent.parent / "deploy" / "peers"
PERF_ANALYZER = shutil.which("perf_analyzer")


def run(home, *arguments):
    environment = {**os.environ, "FEWHEADS_PEERS": str(home)}
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(PEERS))
    return importlib.import_module("report")


def test_missing_peers_are_listed_and_unknown_names_rejected(tmp_path):
    compare = (sys.executable, str(PEERS / "compare.py"), f"--out={tmp_path / 'out'}")
    done = run(tmp_path, *compare)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "not installed: MLServer: deploy/peers/install.sh mlserver" in lines
    assert all(line.startswith("not installed: ") for line in lines)
    done = run(tmp_path, *compare, "--only=zz")
    assert done.returncode == 2
    assert "--only: got zz, expected a part of a server's name: fewheads, " in " ".join(done.stderr.split())
    done = run(tmp_path, str(PEERS / "install.sh"), "zz")
    assert done.returncode == 2
    assert "zz: unknown" in done.stderr
    assert not list(tmp_path.iterdir())


def cell(server, repetition=1, **figures):
    place = {"model": "mlp", "client": "h2load", "concurrency": 1, "day": "2026-01-01", "repetition": repetition}
    usual = {"mean_us": 1.0, "p50_us": 1.0, "p99_us": 9.0, "per_second": 1.0, "cpu_us": 1.0, "foreign_cores": 0.0}
    return {"server": server, "version": "", **place, **usual, **figures}


def test_noisy_measurements_are_left_out_or_marked(report):
    start = {"server": "fewheads, nghttp2", "models": "mlp", "version": "", "day": "2026-01-01", "ready_s": 1.0}
    start |= {"rss_mb": 90.0, "pss_mb": 50.0, "processes": 1, "repetition": 1}
    figures = ({"p50_us": 100}, {"p50_us": 120}, {"p50_us": 900, "foreign_cores": 1.5})
    records = [start, *(cell("fewheads, nghttp2", **each) for each in figures)]
    records.append(cell("other", p50_us=330, foreign_cores=1.0))
    results = report.summarise(records, {"cpu": "one"})
    assert {c["server"]: (c["p50_us"], c["ratio"]) for c in results["cells"]} == {
        "fewheads, nghttp2": (110, 1),
        "other": (330, 3),
    }
    page = report.markdown(results)
    assert "| other | 330 (3.00)* |" in page
    assert "| fewheads, nghttp2 | 110 (1.00) |" in page
    assert "| fewheads, nghttp2 | mlp |  | 1.00 | 1 | 90 | 50 | 1 |" in page


def test_ratios_are_taken_within_one_repetition(report):
    records = []
    # The machine gets slower and slower; the ratio of the medians would be 0.67.
    for repetition, (ours_us, theirs_us) in enumerate([(10, 20), (20, 30), (50, 80)], start=1):
        for server, cpu_us in (("fewheads, nghttp2", ours_us), ("Triton, Python backend", theirs_us)):
            records.append(cell(server, repetition, model="accelerator", concurrency=16, cpu_us=cpu_us))
    records.append(cell("fewheads, nghttp2", 4, model="accelerator", concurrency=16))  # without a rival
    for server, foreign_cores in (("fewheads, nghttp2", 1.5), ("Triton, Python backend", 0.0)):
        records.append(cell(server, 5, model="accelerator", concurrency=16, foreign_cores=foreign_cores))
    for server, mean_us in (("fewheads, nghttp2", 1150), ("Triton, Python backend", 1260)):
        alone = {"mean_us": mean_us, "run_us": 1060.0, "beyond_us": mean_us - 1060.0}
        records.append(cell(server, 1, model="accelerator", **alone))
        records.append(cell(server, 1, model="accelerator", client="grpcio stubs", concurrency=16, cpu_us=mean_us))
    results = report.summarise(records, {"cpu": "one"})
    ratios = {ratio["figure"]: ratio for ratio in results["ratios"] if ratio["client"] == "h2load"}
    cpu = ratios["CPU per request, 16 at once"]
    assert (cpu["median"], cpu["min"], cpu["max"], cpu["repetitions"]) == (0.625, 0.5, 2 / 3, 3)
    assert ratios["time beyond the runner, 1 at once"]["median"] == 0.45
    page = report.markdown(results)
    assert "| fewheads, nghttp2 / Triton, Python backend | h2load | 0.62 (0.50..0.67) |  | 0.45 (0.45..0.45) |" in page
    assert "| fewheads, nghttp2 / Triton, Python backend | grpcio stubs | 0.91 (0.91..0.91) |  |  |" in page
    assert "| Triton, Python backend | 200 | 1 (" in page
    assert "A run on the accelerator takes 1060 µs" in page


@pytest.mark.parametrize("page", sorted(PEERS.glob("RESULTS*.md")), ids=lambda page: page.name)
def test_published_page_shows_the_published_figures(page, report):
    results = json.loads(page.with_name(page.name.replace("RESULTS", "results")).with_suffix(".json").read_text())
    assert page.read_text().endswith(f"\n## The tables\n\n{report.markdown(results)}")


def test_publishing_keeps_the_prose(tmp_path, report):
    results = report.summarise([cell("fewheads, nghttp2")], {"cpu": "one"})
    page = tmp_path / "RESULTS.md"
    page.write_text("# Title\n\nProse.\n\n## The tables\n\n| old |\n")
    report.publish(results, page)
    assert page.read_text() == f"# Title\n\nProse.\n\n## The tables\n\n{report.markdown(results)}"


@pytest.mark.slow
@pytest.mark.skipif(not PERF_ANALYZER, reason="perf_analyzer is not on the PATH")
def test_perf_analyzer_counts_as_the_server_does(tmp_path):
    bundle = write_letters_bundle(tmp_path / "letters")
    arguments = (f"--perf-analyzer={PERF_ANALYZER}", "--requests=12", "--tokens=5", f"--out={tmp_path / 'out.json'}")
    done = run(tmp_path, sys.executable, str(PEERS / "text_clients.py"), str(bundle.path), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    trials = {one["client"]: one["reported"] for one in json.loads((tmp_path / "out.json").read_text())["trials"]}
    assert [one["requests"] for one in trials.values()] == [12] * 5
    assert trials["perf_analyzer, grpc"]["responses"] == trials["perf_analyzer, openai"]["responses"] == 12
    assert 12 < trials["perf_analyzer, stream"]["responses"] <= 12 * 5


@pytest.mark.slow
def test_it_measures_bare_grpcio_and_fewheads_on_the_accelerator(tmp_path):
    out = tmp_path / "out"
    arguments = ["--models=accelerator", "--only=bare", "--only=fewheads", "--repetitions=1", "--seconds=0.2"]
    done = run(tmp_path, sys.executable, str(PEERS / "compare.py"), *arguments, f"--out={out}")
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((out / "results.json").read_text())
    assert {start["models"] for start in results["starts"]} == {"accelerator"}
    cells = {(c["server"], c["client"], c["concurrency"]): c for c in results["cells"]}
    for server in ("bare grpcio, batching", "fewheads, grpcio"):
        assert {place[1:] for place in cells if place[0] == server} == {
            *((client, level) for client in ("h2load", "grpcio stubs") for level in (1, 16)),
            ("h2load", 64),
        }
        alone, many = cells[server, "h2load", 1], cells[server, "h2load", 64]
        assert alone["p50_us"] >= 1000  # the accelerator's run
        assert alone["beyond_us"] == pytest.approx(alone["mean_us"] - alone["run_us"])
        assert many["per_second"] > 2 * alone["per_second"]  # requests share runs
        assert many["cpu_us"] > 0
    assert "| fewheads, grpcio / bare grpcio, batching |" in (out / "results.md").read_text()


def test_batches_that_run_to_their_slowest_row_give_the_same_answers(tmp_path):
    bundle = write_halving_bundle(tmp_path / NAME)
    slow = {"python": (sys.executable, str(PEERS / "run_to_slowest.py")), "arguments": ["--instances=1"]}
    with (
        running_server([bundle.path], **slow) as ready,
        grpc.insecure_channel(f"127.0.0.1:{ready.grpc_port}") as channel,
    ):
        stub = open_stub(channel)
        first = stub.ModelInfer.future(loop_request(ENDLESS, max_loops=2_000))
        second = [stub.ModelInfer.future(loop_request(1, max_loops=loops)) for loops in (3, 500)]
        loops = [array_of(future.result(60), "loops").tolist() for future in (first, *second)]
    assert loops == [[2_000], [3], [4]]
