"""One recipe for each server: its command, environment and protocol, and the models it serves."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from work import HOME, MODELS, ON_CPU, WORK, onnx, repository

TREE = Path(__file__).resolve().parents[2]
SERVERS = Path(__file__).parent / "servers"
#: The server whose latencies the others' are compared with.
OURS = "fewheads, nghttp2"
TRITON = "Triton, Python backend"
BARE_BATCHING = "bare grpcio, batching"
ACCELERATOR = ("accelerator",)
_FILES = [f"{name}={onnx(name)}" for name in ON_CPU]
#: Two batches of the accelerator: one in its run, one that gathers meanwhile.
_BATCHING_THREADS = 2 * MODELS["accelerator"].max_rows
#: Every server computes each run on one thread.
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SERVERS), "FEWHEADS_TREE": str(TREE)}
_TRITON_TYPES = {"FP32": "TYPE_FP32", "INT64": "TYPE_INT64"}


class Start(NamedTuple):
    """A process to start, with its whole environment and its working directory."""

    command: list[str]
    environment: dict[str, str]
    directory: Path = WORK


class Recipe(NamedTuple):
    """One server.

    Attributes:
        name: its row in the tables, which recipes with different models may share.
        start: makes the process to start from two free ports, the first of which is for the requests.
        models: the models that it serves.
        http: whether it speaks JSON over HTTP, because it has no gRPC.
        environment: the directory of its virtual environment; None is this process's.
        start_only: whether only its start is measured.
    """

    name: str
    start: Callable[[int, int], Start]
    models: tuple[str, ...] = ON_CPU
    http: bool = False
    environment: str | None = None
    start_only: bool = False

    @property
    def installed(self) -> bool:
        """Whether its packages are installed."""
        return self.environment is None or (HOME / self.environment / "versions.txt").is_file()

    @property
    def version(self) -> str:
        """The version of its package."""
        if self.environment is None:
            return ""
        package = {"triton": "nvidia-pytriton"}.get(self.environment, self.environment)
        lines = (HOME / self.environment / "versions.txt").read_text().splitlines()
        return next((line for line in lines if line.startswith(f"{package}==")), "")


def _ours(name: str, *arguments: str, models: tuple[str, ...] = ON_CPU, start_only: bool = False) -> Recipe:
    def start(port: int, other: int) -> Start:
        command = [sys.executable, "-m", "edge", "serve", str(repository(models)), f"--grpc-port={port}"]
        command += ["--no-metrics", f"--cache={WORK / 'cache'}", *arguments]
        return Start(command, {**_ENVIRONMENT, "PYTHONPATH": str(TREE)})

    return Recipe(f"fewheads, {name}", start, models, start_only=start_only)


def _bare(port: int, other: int) -> Start:
    return Start([sys.executable, str(SERVERS / "bare.py"), str(port), "4", *_FILES], _ENVIRONMENT)


def _bare_batching(port: int, other: int) -> Start:
    model = MODELS["accelerator"]
    command = [sys.executable, str(SERVERS / "bare_batching.py"), str(port), str(_BATCHING_THREADS)]
    return Start([*command, str(onnx("accelerator")), str(model.run_ms), str(model.max_rows)], _ENVIRONMENT)


def _triton(models: tuple[str, ...], instances: int, port: int, other: int) -> Start:
    directory = WORK / "triton"
    shutil.rmtree(directory, ignore_errors=True)
    for name in models:
        model = MODELS[name]
        (directory / name / "1").mkdir(parents=True)
        shutil.copy(SERVERS / "triton_model.py", directory / name / "1" / "model.py")
        shutil.copy(SERVERS / "sessions.py", directory / name / "1")
        lines = [f'name: "{name}" backend: "python" max_batch_size: {model.max_rows} dynamic_batching {{}}']
        lines.append(f"instance_group {{ count: {instances} kind: KIND_CPU }}")
        for key, value in (("file", onnx(name)), ("run_ms", model.run_ms)):
            lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
        for kind, specs in (("input", model.inputs), ("output", model.outputs)):
            for spec in specs:
                tensor = f'name: "{spec.name}" data_type: {_TRITON_TYPES[spec.datatype]} dims: {list(spec.shape[1:])}'
                lines.append(f"{kind} {{ {tensor} }}")
        (directory / name / "config.pbtxt").write_text("\n".join(lines))
    site = HOME / "triton" / "lib" / "python3.11" / "site-packages"
    command = [str(site / "pytriton" / "tritonserver" / "bin" / "tritonserver"), f"--model-repository={directory}"]
    command += [f"--backend-directory={HOME / 'triton' / 'backends'}", "--allow-http=false", "--allow-metrics=false"]
    command += ["--grpc-address=127.0.0.1", f"--grpc-port={port}"]
    environment = {**_ENVIRONMENT, "LD_LIBRARY_PATH": str(site / "nvidia_pytriton.libs")}
    # The Python that it embeds finds its packages through PATH.
    environment["PATH"] = f"{HOME / 'triton' / 'bin'}:{environment['PATH']}"
    return Start(command, environment)


def _mlserver(port: int, other: int) -> Start:
    directory = WORK / "mlserver"
    shutil.rmtree(directory, ignore_errors=True)
    for name in ON_CPU:
        (directory / name).mkdir(parents=True)
        settings = {"name": name, "implementation": "mlserver_model.Onnx", "parameters": {"uri": str(onnx(name))}}
        (directory / name / "model-settings.json").write_text(json.dumps(settings))
    # It is faster here without a worker process. The file overrides the environment's variables.
    settings = {"host": "127.0.0.1", "http_port": other, "grpc_port": port, "parallel_workers": 0}
    settings |= {"metrics_endpoint": None, "debug": False}
    (directory / "settings.json").write_text(json.dumps(settings))
    return Start([str(HOME / "mlserver" / "bin" / "mlserver"), "start", str(directory)], _ENVIRONMENT, directory)


def _python(name: str, *arguments: str) -> Start:
    """Return the start of ``<name>_server.py`` with the Python of that server's environment."""
    return Start([str(HOME / name / "bin" / "python"), str(SERVERS / f"{name}_server.py"), *arguments], _ENVIRONMENT)


def _kserve(port: int, other: int) -> Start:
    return _python("kserve", *_FILES, f"--grpc_port={port}", f"--http_port={other}")


def _litserve(port: int, other: int) -> Start:
    return _python("litserve", str(port), *_FILES)


def _bentoml(port: int, other: int) -> Start:
    command = [str(HOME / "bentoml" / "bin" / "bentoml"), "serve", "bentoml_service:Onnx", "--host=127.0.0.1"]
    models = {f"MODEL_{name.upper()}": str(onnx(name)) for name in ON_CPU}
    quiet = {"BENTOML_CONFIG_OPTIONS": "api_server.logging.access.enabled=false", "BENTOML_DO_NOT_TRACK": "1"}
    quiet |= {"BENTOML_HOME": str(WORK / "bentoml")}
    return Start([*command, f"--port={port}"], {**_ENVIRONMENT, **models, **quiet}, SERVERS)


def recipes() -> list[Recipe]:
    """Return the recipes of all servers, those of Fewheads first."""
    simulated = f"--target=simulated:{MODELS['accelerator'].run_ms:g}"
    transports = ("nghttp2", "grpcio") if find_spec("ngh2") else ("grpcio",)
    ours = [_ours(name, f"--transport={name}") for name in transports]
    if "nghttp2" in transports:
        ours.append(_ours("nghttp2, 1 instance", "--transport=nghttp2", "--instances=1"))
    return [
        *ours,
        _ours("the MLP alone", f"--transport={transports[0]}", models=("mlp",), start_only=True),
        Recipe("bare grpcio, 4 threads", _bare),
        Recipe(TRITON, partial(_triton, ON_CPU, 1), environment="triton"),
        Recipe("Triton, 2 instances", partial(_triton, ON_CPU, 2), environment="triton"),
        Recipe("MLServer", _mlserver, environment="mlserver"),
        Recipe("KServe SDK", _kserve, environment="kserve"),
        Recipe("LitServe (HTTP)", _litserve, http=True, environment="litserve"),
        Recipe("BentoML (HTTP)", _bentoml, http=True, environment="bentoml"),
        *(_ours(name, f"--transport={name}", simulated, models=ACCELERATOR) for name in transports),
        Recipe(BARE_BATCHING, _bare_batching, ACCELERATOR),
        Recipe(TRITON, partial(_triton, ACCELERATOR, 1), ACCELERATOR, environment="triton"),
    ]
