"""Test of the server on an emulated aarch64 processor with Triton's stock client, over gRPC and HTTP.

    make aarch64
    python deploy/aarch64/emulate.py [BUNDLE...]

Debian's arm64 Python and the wheels that a Jetson installs are unpacked below ``.aarch64/`` and run by qemu's user-mode
emulation. The responses are compared with those of the same bundles on this machine. Downloads are kept.
The versions are JetPack 6's, because JetPack 7's ONNX Runtime 1.31 crashes in qemu. Needs Python 3.11 or newer,
apt, and an x86-64 machine. It proves nothing about the GPU or about speed.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import tritonclient.grpc
import tritonclient.http

import wheels
from debian import Packages
from edge.bundles.bundle import Bundle
from edge.bundles.expression import MAX_TERMS
from edge.bundles.golden import Golden, compare
from edge.bundles.steps import ExpressionPreprocess
from edge.cli.output import json_option, print_json, print_table, remark
from edge.datatypes import Array, datatype_of
from edge.errors import BackendError, FewheadsError, GoldenError, Raw, UsageError
from edge.launch import running_server
from edge.server import Ready

ORACLE = wheels.ROOT / "tests" / "data" / "bundles" / "calculator-oracle-1"
#: Debian's packages: Python, and system libraries that Python wheels require.
_PACKAGES = ("python3", "libstdc++6", "libgomp1")
_EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
_TRANSPORTS = ("nghttp2", "grpcio")
_CLIENT_SECONDS = 30.0


class Comparison(msgspec.Struct, frozen=True):
    """Comparison of the emulated server's responses with those of this machine.

    Attributes:
        model: its name.
        over: the gRPC transport, or ``http``.
        requests: number of requests, of one row each.
        identical: number of responses that are equal bit by bit.
        max_abs_diff: largest difference of a number.
        passed: whether all differences are within the tolerance of the bundle's artifact.
    """

    model: str
    over: str
    requests: int
    identical: int
    max_abs_diff: float
    passed: bool


class Report(msgspec.Struct, frozen=True):
    """Result of a run: the emulated machine, its doctor's report, the comparisons, and seconds by step."""

    machine: str
    python: str
    versions: dict[str, str]
    doctor: dict[str, Any]
    comparisons: tuple[Comparison, ...]
    seconds: dict[str, float]


@click.command()
@click.argument("bundles", nargs=-1, type=click.Path(path_type=Path), metavar="[BUNDLE...]")
@click.option("--requests", type=click.IntRange(min=1), default=1500, show_default=True, help="For each calculator.")
@click.option("--directory", type=click.Path(path_type=Path), default=Path(".aarch64"), show_default=True)
@click.option("--sources", type=click.Path(path_type=Path, exists=True), help="An apt list of mirrors with arm64.")
@json_option
def emulate(bundles: tuple[Path, ...], requests: int, directory: Path, sources: Path | None, as_json: bool) -> None:
    """Serve each BUNDLE, by default the calculator of the tests, on an emulated aarch64, and compare its responses."""
    check_machine(platform.machine())
    opened = [Bundle.open(path) for path in bundles or (ORACLE,)]
    seconds: dict[str, float] = {}
    with _step(seconds, "Debian packages for arm64"):
        root = Packages(directory / "debian", "arm64", sources).unpack(_PACKAGES)
        qemu = _emulator(directory)
    with _step(seconds, "wheels for aarch64"):
        target = _target(root)
        resolved = wheels.resolve(wheels.device_requirements(target), target, wheels.tested_versions(target))
        site = _install(resolved, target, directory)
        own = _own_wheel(directory)
    path = f"PYTHONPATH={site.absolute()}:{own.absolute()}"
    interpreter = root.absolute() / "usr" / "bin" / "python3"
    python = ["env", path, "PYTHONSAFEPATH=1", str(qemu), "-L", str(root.absolute()), str(interpreter)]
    with _step(seconds, "fewheads doctor"):
        doctor = _doctor(python, directory)
    sent = {bundle: _requests(bundle, requests) for bundle in opened}
    with _step(seconds, "the answers of this machine"), _serve(opened, directory / "native") as ready:
        native = {bundle: _ask_grpc(ready, bundle, sent[bundle]) for bundle in opened}
    comparisons = []
    for transport in _TRANSPORTS:
        arguments = [f"--transport={transport}", "--http-port=0"]
        with (
            _step(seconds, f"the answers of the emulated machine, {transport}"),
            _serve(opened, directory / "emulated", python, arguments) as ready,
        ):
            for bundle in opened:
                answers = _ask_grpc(ready, bundle, sent[bundle])
                comparisons.append(_compare(bundle, transport, answers, native[bundle]))
                if transport == _TRANSPORTS[0]:
                    answers = _ask_http(ready, bundle, sent[bundle][: max(requests // 10, 1)])
                    comparisons.append(_compare(bundle, "http", answers, native[bundle]))
    versions = {name: wheel.version for name, wheel in sorted(resolved.items())}
    report = Report("aarch64", target.python, versions, doctor, tuple(comparisons), seconds)
    _show(report, as_json=as_json)
    failed = next((one for one in comparisons if not one.passed), None)
    if failed:
        raise GoldenError(
            f"{failed.model} on aarch64",
            given=Raw(f"a largest difference of {failed.max_abs_diff:.3g} from this machine's answers"),
            expected="at most the tolerance of the bundle",
            fix="Do not serve it on aarch64; compare the versions of ONNX Runtime on both sides.",
        )


def check_machine(machine: str) -> None:
    """Check that this machine can emulate aarch64.

    Raises:
        UsageError: the machine is not an x86-64.
    """
    if machine != "x86_64":
        fix = "On an aarch64 machine, run the tests themselves: make test."
        raise UsageError("aarch64", given=machine, expected="an x86_64 machine to emulate it on", fix=fix)


@contextmanager
def _step(seconds: dict[str, float], title: str) -> Iterator[None]:
    remark(f"{title} …")
    begun = time.perf_counter()
    yield
    seconds[title] = time.perf_counter() - begun
    remark(f"{title}: {seconds[title]:.1f} s")


def _emulator(directory: Path) -> Path:
    """Return qemu's emulator of aarch64: the installed one, or else that of this machine's distribution, unpacked."""
    for name in _EMULATORS:
        if found := shutil.which(name):
            return Path(found)
    root = Packages(directory / "qemu", "amd64").unpack(["qemu-user-static"])
    return next(path.absolute() for name in _EMULATORS if (path := root / "usr" / "bin" / name).is_file())


def _target(root: Path) -> wheels.Target:
    """Return the unpacked Python with the versions of JetPack 6."""
    python = (root / "usr" / "bin" / "python3").readlink().name.removeprefix("python")
    return wheels.Target(python, wheels.JETPACK_6.glibc_minor, markers_python=wheels.JETPACK_6.python)


def _install(resolved: dict[str, wheels.Wheel], target: wheels.Target, directory: Path) -> Path:
    """Return the directory with exactly these wheels; a complete one is reused."""
    site, listed = directory / "site", sorted(f"{wheel.name}=={wheel.version}" for wheel in resolved.values())
    stamp = site / "installed.json"
    if not stamp.exists() or json.loads(stamp.read_text()) != [target.python, *listed]:
        shutil.rmtree(site, ignore_errors=True)
        wheels.install(resolved, target, site)
        stamp.write_text(json.dumps([target.python, *listed]))
    return site


def _own_wheel(directory: Path) -> Path:
    """Build the project's own wheel from this checkout and unpack it; return the directory."""
    own = directory / "fewheads"
    shutil.rmtree(own, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, f"--target={own}", str(wheels.ROOT)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BackendError(
            "the wheel of fewheads",
            given=Raw(done.stderr.strip().splitlines()[-1]),
            expected="a wheel built from this checkout",
            fix="Run pip wheel --no-deps . for the whole message.",
        )
    return own


def _doctor(python: list[str], directory: Path) -> dict[str, Any]:
    command = [*python, "-m", "edge", "doctor", f"--cache={directory / 'emulated'}", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BackendError(
            "fewheads doctor on aarch64",
            given=Raw(f"exit code {done.returncode}: {done.stderr.strip() or done.stdout}"),
            expected="exit code 0",
            fix="Its message says what is missing.",
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _serve(
    bundles: list[Bundle],
    cache: Path,
    python: list[str] | None = None,
    arguments: list[str] | None = None,
) -> AbstractContextManager[Ready]:
    paths = [bundle.path for bundle in bundles]
    return running_server(
        paths, target="onnxruntime", cache=cache, arguments=arguments or [], python=python or [sys.executable]
    )


def _requests(bundle: Bundle, count: int) -> list[dict[str, Array]]:
    """Return requests of one row: random expressions for a calculator, all golden rows for other models."""
    preprocess = bundle.manifest.preprocess
    if isinstance(preprocess, ExpressionPreprocess):
        generator, most = np.random.default_rng(0), int(min(preprocess.max_abs_operand, 1000))
        texts = []
        for _ in range(count):
            operands = map(str, generator.integers(-most, most + 1, generator.integers(1, MAX_TERMS + 1)))
            first, *others = operands
            texts.append(first + "".join(f" {'+-'[generator.integers(2)]} {operand}" for operand in others))
        return [{preprocess.input: np.array([[text.encode()]], np.object_)} for text in texts]
    arrays = bundle.golden.raw or bundle.golden.inputs
    return [{name: array[row : row + 1] for name, array in arrays.items()} for row in range(bundle.golden.rows)]


def _ask_grpc(ready: Ready, bundle: Bundle, requests: list[dict[str, Array]]) -> list[dict[str, Array]]:
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client:

        def ask(tensors: list[Any]) -> Any:
            return client.infer(bundle.manifest.name, tensors, client_timeout=_CLIENT_SECONDS)

        return [_outputs(bundle, ask(_tensors(tritonclient.grpc, request))) for request in requests]


def _ask_http(ready: Ready, bundle: Bundle, requests: list[dict[str, Array]]) -> list[dict[str, Array]]:
    url = f"127.0.0.1:{ready.http_port}"
    with tritonclient.http.InferenceServerClient(url, network_timeout=_CLIENT_SECONDS) as client:

        def ask(tensors: list[Any]) -> Any:
            return client.infer(bundle.manifest.name, tensors)

        return [_outputs(bundle, ask(_tensors(tritonclient.http, request))) for request in requests]


def _tensors(package: Any, request: dict[str, Array]) -> list[Any]:
    tensors = []
    for name, array in request.items():
        tensor = package.InferInput(name, list(array.shape), datatype_of(array))
        tensor.set_data_from_numpy(array.astype(np.object_) if datatype_of(array) == "BYTES" else array)
        tensors.append(tensor)
    return tensors


def _outputs(bundle: Bundle, result: Any) -> dict[str, Array]:
    postprocess = bundle.manifest.postprocess
    specs = [*bundle.manifest.outputs, *(postprocess.results if postprocess else ())]
    found = {spec.name: result.as_numpy(spec.name) for spec in specs}
    return {name: array for name, array in found.items() if array is not None}  # answers come without logits


def _compare(bundle: Bundle, over: str, got: list[dict[str, Array]], native: list[dict[str, Array]]) -> Comparison:
    tolerance = bundle.manifest.tiers[0].artifacts[0].tolerance
    pairs = list(zip(got, native[: len(got)], strict=True))
    identical = sum(all(np.array_equal(one[name], other[name]) for name in other) for one, other in pairs)
    reports = [compare(one, Golden(inputs=other, outputs=other), tolerance) for one, other in pairs]
    largest = max(report.max_abs_diff for report in reports)
    passed = all(report.passed for report in reports)
    return Comparison(bundle.manifest.name, over, len(got), identical, largest, passed)


def _show(report: Report, *, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    columns = ["model", "over", "requests", "identical", "largest difference", "within tolerance"]
    rows = [[*msgspec.structs.astuple(one)[:-1], "yes" if one.passed else "NO"] for one in report.comparisons]
    print_table(f"emulated {report.machine}, Python {report.python}, beside {platform.machine()}", columns, rows)
    print_table("time", ["step", "s"], [[title, round(took, 1)] for title, took in report.seconds.items()])


def main() -> None:
    """Run the command; a user's mistake ends in one line."""
    try:
        emulate.main(standalone_mode=True)
    except FewheadsError as error:
        click.echo(f"aarch64: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
