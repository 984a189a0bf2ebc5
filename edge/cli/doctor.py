"""``fewheads doctor``: whether this machine can do its part, and what to do where it cannot."""

from __future__ import annotations

import platform
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import click
import msgspec

from edge import __version__
from edge.cli.output import json_option, print_json, print_table
from edge.errors import FewheadsError
from edge.instruments.memory import MemorySampler
from edge.runtimes import backends, tensorrt_builder
from edge.runtimes.cache import cache_directory
from edge.settings import Settings

#: What the server needs, and what only some machines do.
_NEEDED = ("grpcio", "grpcio-health-checking", "grpcio-reflection", "msgspec", "numpy", "prometheus-client", "protobuf")
_OPTIONAL = {
    "onnxruntime": "serving without TensorRT needs it: pip install 'fewheads[cpu]'",
    "onnxruntime-gpu": "only for NVIDIA GPUs: pip install 'fewheads[cuda]'",
    "torch": "only to train: pip install 'fewheads[export]'",
}
_LOW_MEMORY_BYTES = 512 * 2**20


class Check(msgspec.Struct, frozen=True):
    """One finding; ``advice`` is empty when all is well."""

    name: str
    status: Literal["ok", "absent", "warning", "failed"]
    found: str
    advice: str = ""


@click.command()
@click.option("--cache", type=click.Path(path_type=Path), help="Where built models lie.  [default: ~/.cache/fewheads]")
@json_option
@click.pass_context
def doctor(context: click.Context, cache: Path | None, as_json: bool) -> None:
    """Check Python, packages, backend, memory, cache and ports; exit with 1 if the server could not run."""
    checks = [*_python(), *_packages(), *_backend(), *_memory(), *_cache(cache_directory(cache)), *_ports()]
    if as_json:
        print_json({"version": __version__, "checks": checks})
    else:
        rows = [[check.name, check.status, check.found, check.advice] for check in checks]
        print_table(f"fewheads {__version__}", ["check", "status", "found", "advice"], rows)
    context.exit(int(any(check.status == "failed" for check in checks)))


def _python() -> Iterator[Check]:
    found = f"{platform.python_version()} on {platform.machine()}"
    ok = sys.version_info >= (3, 10)
    yield Check("python", "ok" if ok else "failed", found, "" if ok else "Python 3.10 or newer is needed.")


def _packages() -> Iterator[Check]:
    for name in _NEEDED:
        found = _installed(name)
        yield Check(name, "ok", found) if found else Check(name, "failed", "", f"pip install {name}")
    for name, advice in _OPTIONAL.items():
        found = _installed(name)
        yield Check(name, "ok", found) if found else Check(name, "absent", "", advice)


def _backend() -> Iterator[Check]:
    yield _tried("jetson", lambda: backends.jetson_model() or "no", "")
    yield _tried("tensorrt", lambda: tensorrt_builder.version("tensorrt"), "absent")
    yield _tried("tensorrt-rtx", lambda: tensorrt_builder.version("tensorrt_rtx"), "absent")
    yield _tried("backend", lambda: backends.choose().reason, "failed")


def _tried(name: str, look: Callable[[], str], otherwise: Literal["absent", "failed", ""]) -> Check:
    try:
        return Check(name, "ok", look())
    except FewheadsError as error:
        return Check(name, otherwise or "failed", "", error.fix)


def _memory() -> Iterator[Check]:
    for sample in MemorySampler().sample():
        if sample.kind == "system_available":
            low = sample.size_bytes < _LOW_MEMORY_BYTES
            advice = "Stop other programs: loading a model may fail." if low else ""
            yield Check("memory", "warning" if low else "ok", f"{sample.size_bytes / 2**20:.0f} MiB available", advice)


def _cache(cache: Path) -> Iterator[Check]:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        advice = "Give a writable --cache or $FEWHEADS_CACHE, or models are built again at each start."
        yield Check("cache", "warning", str(error), advice)
    else:
        yield Check("cache", "ok", str(cache))


def _ports() -> Iterator[Check]:
    for option, port in (("--grpc-port", Settings.grpc_port), ("--metrics-port", Settings.metrics_port)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((Settings.host, port or 0))
            except OSError as error:
                yield Check(f"port {port}", "warning", str(error), f"Serve on another one with {option}.")
            else:
                yield Check(f"port {port}", "ok", "free")


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
