"""Costs of models: operations, bytes, latency and memory of their bundles, on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edge.bundles.bundle import Bundle
from edge.bundles.expression import TOKENS
from edge.errors import BackendError, Raw
from edge.files import write_whole
from export.estimate.operations import work_of
from export.papers.calculator.bundle import export_run
from export.papers.calculator.comparison import memory
from export.papers.calculator.comparison.results import Cost, Latency, Spread
from export.papers.calculator.runs import Run
from export.papers.experiment import read_part
from export.training.provenance import Processor, processor

#: Expressions of the requests that are timed, with the share of all requests that is sent of them.
ROWS = {1: 1.0, 64: 0.1}
_LEAST_REQUESTS = 10


class _Side(msgspec.Struct):
    """The fields of a report of ``fewheads bench`` that count here, of one side."""

    p50_ms: float


class _Report(msgspec.Struct):
    in_process: _Side
    served: _Side


class Measurements(msgspec.Struct):
    """Measurements of bundles, with what they depend on.

    Attributes:
        processor: that they were measured on.
        onnx: SHA-256 of the ONNX file of each model.
        served_ms: median of each round, by rows and model.
        in_process_ms: the same.
        memory_bytes: of each round, by model.
    """

    processor: Processor
    onnx: dict[str, str]
    served_ms: dict[int, dict[str, list[float]]]
    in_process_ms: dict[int, dict[str, list[float]]]
    memory_bytes: dict[str, list[int]]


def export_groups(
    groups: Mapping[str, Sequence[Run]], repository: Path, on_model: Callable[[str], None]
) -> dict[str, Bundle]:
    """Export the first run of each model, unless its bundle is there; ``on_model`` receives each that is done."""
    bundles: dict[str, Bundle] = {}
    versions: dict[str, int] = {}  # of models that share a name, and differ in their arguments
    for name, (run, *_) in groups.items():
        model = run.config.model
        versions[model] = version = versions.get(model, 0) + 1
        path = repository / f"{model}-{version}"
        if not path.exists() or Bundle.open(path).manifest.provenance != run.config.provenance:
            export_run(run.path, repository, version=version, replace=True)
        bundles[name] = Bundle.open(path)
        on_model(name)
    return bundles


def measure(
    bundles: Mapping[str, Bundle], kept: Path, *, requests: int, rounds: int, on_step: Callable[[str], None]
) -> Measurements:
    """Measure the latencies and the memory of bundles, unless they were measured on this processor before.

    Args:
        kept: file of the measurements.
        requests: of one row, to each model in a round.
        rounds: repetitions, each of which measures every model once, so that other load meets all of them alike.
        on_step: receives what is measured next; there are ``rounds * (len(ROWS) + 1)`` steps.

    Raises:
        BackendError: a measuring process fails.
    """
    onnx = {name: bundle.manifest.files[_onnx_file(bundle)].sha256 for name, bundle in bundles.items()}
    here = processor()
    if kept.exists():
        earlier = read_part(kept, Measurements)
        if (earlier.processor, earlier.onnx) == (here, onnx):
            return earlier
    found = Measurements(here, onnx, _empty(bundles), _empty(bundles), {name: [] for name in bundles})
    paths = [str(bundle.path) for bundle in bundles.values()]
    for number in range(1, rounds + 1):
        for rows, share in ROWS.items():
            on_step(f"round {number}: requests of {rows}")
            count = max(round(requests * share), _LEAST_REQUESTS)
            output = _output("edge", "bench", *paths, f"--requests={count}", f"--rows={rows}", "--json")
            for name, report in zip(bundles, msgspec.json.decode(output, type=list[_Report]), strict=True):
                found.served_ms[rows][name].append(report.served.p50_ms)
                found.in_process_ms[rows][name].append(report.in_process.p50_ms)
        on_step(f"round {number}: memory")
        for name, path in zip(bundles, paths, strict=True):
            found.memory_bytes[name].append(int(_output(memory.__name__, path)))
    write_whole(kept, msgspec.json.encode(found))
    return found


def _empty(models: Iterable[str]) -> dict[int, dict[str, list[float]]]:
    return {rows: {name: [] for name in models} for rows in ROWS}


def costs_of(bundles: Mapping[str, Bundle], measured: Measurements | None, reference: str) -> dict[str, Cost]:
    """Return the cost of each model.

    Args:
        measured: latencies and memory; None leaves them out.
        reference: the model that latencies are relative to.
    """
    costs = {}
    for name, bundle in bundles.items():
        file = _onnx_file(bundle)
        gflop = work_of(bundle.read(file), {"x": (1, TOKENS)}, name).gflop
        cost = Cost(1e3 * sum(gflop.values()), bundle.manifest.files[file].size_bytes)
        if measured is not None:
            latencies = {rows: _latency(measured, rows, name, reference) for rows in measured.served_ms}
            cost = msgspec.structs.replace(cost, memory_bytes=_spread(measured.memory_bytes[name]), latencies=latencies)
        costs[name] = cost
    return costs


def _latency(measured: Measurements, rows: int, name: str, reference: str) -> Latency:
    sides = [side[rows] for side in (measured.served_ms, measured.in_process_ms)]
    times = [_spread(side[name]) for side in sides]
    ratios = [_spread(np.divide(side[name], side[reference])) for side in sides]
    return Latency(*times, *ratios)


def _spread(values: Any) -> Spread:
    return Spread(float(np.median(values)), float(np.min(values)), float(np.max(values)))


def _onnx_file(bundle: Bundle) -> str:
    return bundle.artifact("onnxruntime").file


def _output(module: str, *arguments: str) -> bytes:
    """Return what a module prints in a Python process of its own; its progress and errors go to stderr."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        given, fix = Raw(f"exit code {done.returncode}"), "See its message above, or give --no-latency."
        raise BackendError(f"python -m {module}", given=given, expected="a measurement", fix=fix)
    return done.stdout
