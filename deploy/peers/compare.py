"""Servers side by side: the same models, the same requests, the same clients, one server at a time.

    python deploy/peers/compare.py --repetitions 5 --publish      updates RESULTS.md and results.json

Each repetition starts every server afresh, in turn, and checks its answers against ONNX Runtime's before it measures.
``cells.jsonl`` holds the measurements, ``results.json`` and ``results.md`` their medians and ratios.
"""

from __future__ import annotations

import json
import os
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
from edge.errors import FewheadsError, Raw, ServerError, UsageError
from export.training.provenance import described, processor
from recipes import Recipe, recipes
from work import MODELS, WORK, answer, prepare, run_us

#: The first is that of most users: ``tritonclient`` and our own use these stubs.
CLIENTS = {"grpcio stubs": clients.stubs, "h2load": clients.h2load}
#: The stubs share their interpreter's lock, so with more threads they measure themselves.
_MOST_STUBS = 16
_START_SECONDS = 120.0
_TOLERANCE = 1e-5


@click.command()
@click.option("--repetitions", type=click.IntRange(min=1), default=3, show_default=True)
@click.option(
    "--seconds", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Approximate duration of a cell."
)
@click.option("--models", multiple=True, type=click.Choice(list(MODELS)), help="Only these models; may be repeated.")
@click.option("--only", multiple=True, metavar="TEXT", help="Only servers whose names contain TEXT; may be repeated.")
@click.option("--add", is_flag=True, help="Keep the measurements that OUT already holds.")
@click.option("--publish", is_flag=True, help="Replace results.json and the tables of RESULTS.md beside this script.")
@click.option("--out", type=click.Path(path_type=Path), default=Path(".demo/peers"), show_default=True)
def compare(
    repetitions: int,
    seconds: float,
    models: tuple[str, ...],
    only: tuple[str, ...],
    add: bool,
    publish: bool,
    out: Path,
) -> None:
    """Measure all servers that are installed, and write and print the tables."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the running server is stopped, too
    try:
        chosen = [r for r in recipes() if not only or any(text in r.name for text in only)]
        chosen = [r for r in chosen if not models or set(models) & set(r.models)]
        if not chosen:
            given = Raw(" ".join([*only, *models]))
            expected = f"a part of a server's name: {', '.join(dict.fromkeys(r.name for r in recipes()))}"
            raise UsageError("--only", given=given, expected=expected, fix="Leave it out to measure all servers.")
        for line in dict.fromkeys(
            f"not installed: {r.name}: deploy/peers/install.sh {r.environment}" for r in chosen if not r.installed
        ):
            click.echo(line)
        present = [r for r in chosen if r.installed]
        if not present or not (only or models or any(r.environment for r in present)):
            return
        if not clients.has_h2load():
            fix = "apt-get install nghttp2-client"
            raise UsageError("h2load", given=Raw("nothing of that name"), expected="it on the PATH", fix=fix)
        failures = _measure_all(present, models or tuple(MODELS), repetitions, seconds, add, out)
        _write_results(out, publish and not failures)
        for name, reason in failures.items():
            click.echo(f"failed: {name}: {reason}")
        if failures:
            raise SystemExit("nothing was published, because a server failed" if publish else 1)
    except FewheadsError as error:
        stderr.print(f"[red]error:[/red] {error}", highlight=False)
        raise SystemExit(error.exit_code) from None


def _measure_all(
    present: list[Recipe], models: tuple[str, ...], repetitions: int, seconds: float, add: bool, out: Path
) -> dict[str, str]:
    """Write a line of ``cells.jsonl`` for each measurement, and return why servers failed, by name."""
    out.mkdir(parents=True, exist_ok=True)
    served = [name for name in MODELS if any(name in recipe.models for recipe in present)]
    prepare(served)
    truths = {name: answer(name) for name in served}
    simulated = [name for name in served if name in models and MODELS[name].run_ms]
    path = out / "cells.jsonl"
    earlier = _records(path) if add and path.exists() else []
    if not all("repetition" in record for record in earlier):
        given, fix = Raw(f"{path} of an earlier version"), "Measure without --add, or into another --out."
        raise UsageError("--add", given=given, expected="records that name their repetition", fix=fix)
    first = max((record["repetition"] for record in earlier), default=0) + 1
    failures: dict[str, str] = {}
    with progress() as bar, path.open("a" if add else "w") as cells:
        task = bar.add_task("servers", total=repetitions * len(present), note="")
        for repetition in range(first, first + repetitions):
            runs_us = {name: run_us(name) for name in simulated}
            for recipe in present:
                bar.update(task, note=recipe.name)
                common = {
                    "server": recipe.name,
                    "version": recipe.version,
                    "day": time.strftime("%Y-%m-%d", time.gmtime()),
                    "repetition": repetition,
                }
                try:
                    for record in _measure(recipe, models, truths, runs_us, seconds, out):
                        cells.write(json.dumps({**common, **record}) + "\n")
                        cells.flush()
                except (FewheadsError, RuntimeError, OSError) as error:  # the other servers can still be compared
                    failures[f"{recipe.name} ({', '.join(recipe.models)})"] = str(error)
                bar.advance(task)
    return failures


def _write_results(out: Path, publish: bool) -> None:
    records = _records(out / "cells.jsonl")
    if not records:  # every server failed
        return
    results = report.summarise(records, machine())
    directories = [out, Path(__file__).parent] if publish else [out]
    for directory in directories:
        (directory / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    if publish:
        report.publish(results, Path(__file__).parent / "RESULTS.md")
    text = report.markdown(results)
    (out / "results.md").write_text(text)
    click.echo(text)


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _measure(
    recipe: Recipe,
    models: tuple[str, ...],
    truths: dict[str, Any],
    runs_us: dict[str, float],
    seconds: float,
    out: Path,
) -> Iterable[dict[str, Any]]:
    """Start a server, check its answers, and yield the record of its start and then of every cell."""
    port, other = processes.free_ports()
    start = recipe.start(port, other)
    log = out / "server.log"
    begun = time.monotonic()
    with processes.running(start.command, start.environment, start.directory, log) as process:
        for name in recipe.models:
            _check(recipe, process, port, name, truths[name], log)
        ready = time.monotonic() - begun
        rss, pss, count = processes.memory_mb(process.pid)
        served = ", ".join(recipe.models)
        yield {"models": served, "ready_s": ready, "rss_mb": rss, "pss_mb": pss, "processes": count}
        if recipe.start_only:
            return
        for name in recipe.models:
            if name not in models:
                continue
            for client in CLIENTS:
                for concurrency in MODELS[name].concurrency:
                    if client == "h2load" or concurrency <= _MOST_STUBS:
                        cell = _cell(recipe, process.pid, port, name, client, concurrency, seconds)
                        if concurrency == 1 and name in runs_us:
                            cell |= {"run_us": runs_us[name], "beyond_us": cell["mean_us"] - runs_us[name]}
                        yield cell


def _cell(
    recipe: Recipe, root: int, port: int, name: str, client: str, concurrency: int, seconds: float
) -> dict[str, Any]:
    """Measure one model of a running server with one client at one concurrency."""

    def run(number: int) -> clients.Latencies:
        return CLIENTS[client](port, name, recipe.http, concurrency, number, WORK)

    rate = run((8 if name == "minilm" else 20) * concurrency).per_second  # warms up, too
    number = max(int(rate * seconds) // concurrency, 5) * concurrency
    with processes.Watch(root) as watch:
        latencies = run(number)
    cell = {"model": name, "client": client, "concurrency": concurrency, "count": number}
    load = {"cpu_us": watch.cpu_us / number, "foreign_cores": watch.foreign_cores}
    return {**cell, **latencies._asdict(), **load}


def _check(recipe: Recipe, process: subprocess.Popen[bytes], port: int, name: str, truth: Any, log: Path) -> None:
    """Wait until a server answers, and compare its answer with ONNX Runtime's.

    Raises:
        ServerError: the server does not answer, or its answer differs.
    """
    limit = time.monotonic() + _START_SECONDS
    while True:
        try:
            value = clients.ask(port, name, recipe.http)
            break
        except (OSError, grpc.RpcError) as error:
            if process.poll() is not None or time.monotonic() > limit:
                given, fix = Raw(str(error)[:300]), f"Its log: {log.read_text(errors='replace')[-2000:]}"
                raise ServerError(recipe.name, given=given, expected=f"an answer of {name}", fix=fix) from None
            time.sleep(0.02)
    if value.shape != truth.shape or not np.allclose(value, truth, atol=_TOLERANCE):
        fix = "It was not measured, because its answer is wrong."
        raise ServerError(recipe.name, given=value.ravel()[:4].tolist(), expected=f"{truth.ravel()[:4]}", fix=fix)


def machine() -> dict[str, str]:
    """Return the processors with their instruction sets, the kernel, and the versions that matter."""
    (cpu,) = described([processor()])
    h2load = subprocess.run(["h2load", "--version"], capture_output=True, text=True, check=False).stdout
    return {
        "cpu": f"{os.cpu_count()} × {cpu}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "h2load": h2load.strip().removeprefix("h2load "),
    }


if __name__ == "__main__":
    compare()
