"""``fewheads doctor``: checks of this machine, with advice for each problem."""

from __future__ import annotations

import platform
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import click

from edge import __version__
from edge.bundles.bundle import Bundle
from edge.bundles.preprocess import preprocessor
from edge.cli.checks import Check, installed, jetson_checks
from edge.cli.options import PATH, cache_option, target_option
from edge.cli.output import json_option, print_fields, print_json
from edge.errors import FewheadsError
from edge.instruments.board import read_board
from edge.instruments.memory import MemorySampler
from edge.programs.tier_program import load_tier
from edge.runtimes.cache import cache_directory
from edge.runtimes.runtime import Runtime
from edge.runtimes.table import RUNTIMES, choose
from edge.settings import Settings

#: Packages of the server. The runtimes check their own packages.
_NEEDED = ("grpcio", "grpcio-health-checking", "grpcio-reflection", "msgspec", "numpy", "prometheus-client", "protobuf")
_IDLE_GPU = (
    "The GPU stays idle. Install JetPack's python3-libnvinfer and pycuda, or an ONNX Runtime with CUDA, such as Jetson "
    "AI Lab's wheel."
)
_LOW_MEMORY_BYTES = 512 * 2**20


@click.command()
@click.argument("bundles", nargs=-1, type=PATH, metavar="[BUNDLE]...")
@target_option
@cache_option
@json_option
@click.pass_context
def doctor(context: click.Context, bundles: tuple[Path, ...], target: str, cache: Path | None, as_json: bool) -> None:
    """Check Python, packages, board, container, runtimes, memory, cache and ports; exit with 1 if a check fails.

    Of each BUNDLE, also load every file, and compare it with its golden outputs.
    """
    board = read_board()
    checks = [
        Check("python", "ok", f"{platform.python_version()} on {platform.machine()}"),
        *(installed(name, "failed", f"pip install {name}") for name in _NEEDED),
        installed("torch", "absent", "only to train: pip install 'fewheads[export]'"),
        *jetson_checks(board),
        *runtime_checks(on_jetson=board is not None),
        *_memory(),
        _cache(cache_directory(cache)),
        *_ports(),
        *(check for path in bundles for check in bundle_checks(path, target, cache)),
    ]
    if as_json:
        print_json({"version": __version__, "checks": checks})
    else:
        print_fields(f"fewheads {__version__}", ("name", "status", "found", "advice"), checks)
    context.exit(int(any(check.status == "failed" for check in checks)))


def runtime_checks(*, on_jetson: bool) -> Iterator[Check]:
    """Yield the version of each runtime, and the choice of ``auto``, which on a Jetson should use the GPU."""
    yield from map(_installed_runtime, RUNTIMES.values())
    try:
        chosen = choose()
    except FewheadsError as error:
        yield Check("runtime", "failed", "", error.fix)
        return
    idle_gpu = on_jetson and chosen.device == "CPU"
    yield Check("runtime", "warning" if idle_gpu else "ok", chosen.reason, _IDLE_GPU if idle_gpu else "")


def _installed_runtime(runtime: type[Runtime]) -> Check:
    try:
        return Check(runtime.name, "ok", runtime.version())
    except FewheadsError as error:
        return Check(runtime.name, "absent", "", error.fix)


def bundle_checks(path: Path, target: str, cache: Path | None) -> Iterator[Check]:
    """Yield a check of each file of a bundle, or of the first tier that cannot be loaded."""
    name = bundle_name = path.absolute().name
    try:
        bundle = Bundle.open(path)
        if preprocessor(bundle):
            yield Check(f"{name} preprocess", "ok", "the golden inputs are reproduced")
        for tier in bundle.manifest.tiers:
            name = f"{bundle_name} {tier.name}"
            with closing(load_tier(bundle, target, cache, tier=tier.name)) as program:
                for role, loaded in program.files.items():
                    golden = f"largest difference {loaded.golden_report.max_abs_diff:.3g}"
                    found = f"{loaded.artifact.file} on {loaded.runtime.name}, {golden} from the golden outputs"
                    yield Check(f"{name} {role}", "ok", found)
    except FewheadsError as error:
        yield Check(name, "failed", f"{error.subject}: {error.given}", error.fix)


def _memory() -> Iterator[Check]:
    for sample in MemorySampler().sample():
        if sample.kind == "system_available":
            low = sample.size_bytes < _LOW_MEMORY_BYTES
            advice = "Stop other programs: loading a model may fail." if low else ""
            yield Check("memory", "warning" if low else "ok", f"{sample.size_bytes / 2**20:.0f} MiB available", advice)


def _cache(cache: Path) -> Check:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return Check("cache", "ok", str(cache))
    except OSError as error:
        advice = "Give a writable --cache or $FEWHEADS_CACHE, in a container a volume; or each start builds again."
        return Check("cache", "failed", str(error), advice)


def _ports() -> Iterator[Check]:
    for option, port in (("--grpc-port", Settings.grpc_port), ("--metrics-port", Settings.metrics_port)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((Settings.host, port or 0))
                yield Check(f"port {port}", "ok", "free")
            except OSError as error:
                yield Check(f"port {port}", "warning", str(error), f"Serve on another one with {option}.")
