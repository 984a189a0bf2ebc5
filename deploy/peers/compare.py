"""Servers side by side: the same two models, the same requests, the same clients, one server at a time.

    python deploy/peers/compare.py        is the second half of `make bench`

Each repetition starts every server afresh, in turn, and each answer is compared with ONNX Runtime's before anything is
measured. ``cells.jsonl`` holds what was measured, ``results.json`` and ``results.md`` the medians.
"""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import grpc
import numpy as np

import clients
import processes
import report
from edge.cli.output import progress, stderr
from edge.errors import FewheadsError, Literally, ServerError, UsageError
from recipes import Recipe, recipes
from work import SPECS, WORK, answer, prepare

CONCURRENCY = (1, 4, 16)
CLIENTS = {"h2load": clients.h2load, "grpcio stubs": clients.stubs}
_START_SECONDS = 120.0
_TOLERANCE = 1e-5


@click.command()
@click.option("--repetitions", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--seconds", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Of each cell, about.")
@click.option("--only", multiple=True, metavar="TEXT", help="Only servers whose names hold it; may be repeated.")
@click.option("--add", is_flag=True, help="Add to what OUT holds already.")
@click.option("--out", type=click.Path(path_type=Path), default=Path(".demo/peers"), show_default=True)
def compare(repetitions: int, seconds: float, only: tuple[str, ...], add: bool, out: Path) -> None:
    """Measure all servers that are installed, and write and print the tables."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server stays behind
    try:
        _compare(repetitions, seconds, only, add, out)
    except FewheadsError as error:
        stderr.print(f"[red]error:[/red] {error}", highlight=False)
        raise SystemExit(error.exit_code) from None


def _compare(repetitions: int, seconds: float, only: tuple[str, ...], add: bool, out: Path) -> None:
    chosen = [recipe for recipe in recipes() if not only or any(text in recipe.name for text in only)]
    present = [recipe for recipe in chosen if recipe.installed]
    for recipe in chosen:
        if not recipe.installed:
            click.echo(f"not installed: {recipe.name}: {recipe.install}")
    if not only and not any(recipe.environment for recipe in present):
        return
    if not clients.has_h2load():
        fix = "apt-get install nghttp2-client"
        raise UsageError("h2load", given=Literally("nothing of that name"), expected="it on the PATH", fix=fix)
    out.mkdir(parents=True, exist_ok=True)
    prepare()
    truths = {name: answer(name) for name in SPECS}
    failures: dict[str, str] = {}
    with progress() as bar, (out / "cells.jsonl").open("a" if add else "w") as cells:
        task = bar.add_task("servers", total=repetitions * len(present), note="")
        for _ in range(repetitions):
            for recipe in present:
                bar.update(task, note=recipe.name)
                try:
                    for record in _measure(recipe, truths, seconds, out):
                        cells.write(json.dumps(record) + "\n")
                        cells.flush()
                except (FewheadsError, RuntimeError) as error:  # the others can be compared still
                    failures[recipe.name] = str(error)
                bar.advance(task)
    records = [json.loads(line) for line in (out / "cells.jsonl").read_text().splitlines()]
    results = report.summarise(records, _machine())
    (out / "results.json").write_text(json.dumps(results, indent=1))
    text = report.markdown(results)
    (out / "results.md").write_text(text)
    click.echo(text)
    for name, reason in failures.items():
        click.echo(f"failed: {name}: {reason}")


def _measure(recipe: Recipe, truths: dict[str, Any], seconds: float, out: Path) -> Iterable[dict[str, Any]]:
    """Start a server, check it, and yield what starting took and then every cell."""
    port, other = processes.free_ports()
    start = recipe.start(port, other)
    log = out / "server.log"
    begun = time.monotonic()
    common = {"server": recipe.name, "version": recipe.version, "day": time.strftime("%Y-%m-%d", time.gmtime())}
    with processes.running(start.command, start.environment, start.directory, log) as process:
        root = process.pid
        for name in recipe.models:
            _check(recipe, process, port, name, truths[name], log)
        ready = time.monotonic() - begun
        rss, pss, count = processes.memory_mb(root)
        yield {**common, "ready_s": ready, "rss_mb": rss, "pss_mb": pss, "processes": count}
        if len(recipe.models) < len(SPECS):
            return
        for name in SPECS:
            for client, send in CLIENTS.items():
                for concurrency in CONCURRENCY:

                    def run(number: int) -> clients.Latencies:
                        return send(port, name, recipe.http, concurrency, number, WORK)  # noqa: B023

                    rate = run((5 if name == "mlp" else 2) * 4 * concurrency).per_second  # warms up, too
                    number = max(int(rate * seconds) // concurrency, 5) * concurrency
                    with processes.Watch(root) as watch:
                        latencies = run(number)
                    cell = {"model": name, "client": client, "concurrency": concurrency, "count": number}
                    load = {"cpu_us": watch.cpu_us / number, "foreign_cores": watch.foreign_cores}
                    yield {**common, **cell, **latencies._asdict(), **load}


def _check(recipe: Recipe, process: subprocess.Popen[bytes], port: int, name: str, truth: Any, log: Path) -> None:
    """Wait until a server answers, and compare its answer with ONNX Runtime's.

    Raises:
        ServerError: it does not, or answers something else.
    """
    limit = time.monotonic() + _START_SECONDS
    while True:
        try:
            value = clients.ask(port, name, recipe.http)
            break
        except (OSError, grpc.RpcError) as error:
            if process.poll() is not None or time.monotonic() > limit:
                given, fix = Literally(str(error)[:300]), f"Its log: {log.read_text(errors='replace')[-2000:]}"
                raise ServerError(recipe.name, given=given, expected=f"an answer of {name}", fix=fix) from None
            time.sleep(0.02)
    if value.shape != truth.shape or not np.allclose(value, truth, atol=_TOLERANCE):
        fix = "Nothing was measured: what answers wrongly is no competitor."
        raise ServerError(recipe.name, given=value.ravel()[:4].tolist(), expected=f"{truth.ravel()[:4]}", fix=fix)


def _machine() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    h2load = subprocess.run(["h2load", "--version"], capture_output=True, text=True, check=False).stdout
    return {
        "cpu": f"{len(models)} × {models[0]}" if models else platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "h2load": h2load.strip().removeprefix("h2load "),
    }


if __name__ == "__main__":
    compare()
