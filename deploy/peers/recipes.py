"""How each server is started: its command and environment, which protocol it speaks, and whether it is there."""

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

from edge.settings import TRANSPORTS
from work import HOME, MAX_ROWS, SPECS, WORK, model

TREE = Path(__file__).resolve().parents[2]
SERVERS = Path(__file__).parent / "servers"
OURS = "fewheads, default"
_MODELS = [f"{name}={model(name)}" for name in SPECS]
#: One thread in each run, for everyone; threads of BLAS would only disturb.
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SERVERS), "FEWHEADS_TREE": str(TREE)}
_TRITON_TYPES = {"FP32": "TYPE_FP32", "INT64": "TYPE_INT64"}


class Start(NamedTuple):
    """A process to start.

    Attributes:
        command: its arguments.
        environment: all of it.
        directory: where it runs.
    """

    command: list[str]
    environment: dict[str, str]
    directory: Path = WORK


class Recipe(NamedTuple):
    """One server.

    Attributes:
        name: in the table.
        start: from a free port and another one beside it to what has to be started.
        http: whether it speaks JSON over HTTP, for want of gRPC.
        environment: the directory of its virtual environment; None where it is this one.
        install: how to get it.
        models: what it serves; only its start is measured where that is not all.
    """

    name: str
    start: Callable[[int, int], Start]
    http: bool = False
    environment: str | None = None
    install: str = ""
    models: tuple[str, ...] = tuple(SPECS)

    @property
    def installed(self) -> bool:
        """Whether it can be started."""
        return self.environment is None or (HOME / self.environment / "versions.txt").is_file()

    @property
    def version(self) -> str:
        """The version of its package."""
        if self.environment is None:
            return ""
        package = {"triton": "nvidia-pytriton"}.get(self.environment, self.environment)
        lines = (HOME / self.environment / "versions.txt").read_text().splitlines()
        return next((line for line in lines if line.startswith(f"{package}==")), "")


def _ours(*arguments: str, repository: str = "bundles") -> Callable[[int, int], Start]:
    def start(port: int, other: int) -> Start:
        command = [sys.executable, "-m", "edge", "serve", str(WORK / repository), f"--grpc-port={port}", "--no-metrics"]
        command += [f"--cache={WORK / 'cache'}", *arguments]
        return Start(command, {**_ENVIRONMENT, "PYTHONPATH": str(TREE)})

    return start


def _bare(port: int, other: int) -> Start:
    return Start([sys.executable, str(SERVERS / "bare.py"), str(port), "4", *_MODELS], _ENVIRONMENT)


def _python(environment: str) -> str:
    return str(HOME / environment / "bin" / "python")


def _triton(instances: int, port: int, other: int) -> Start:
    repository = WORK / "triton"
    shutil.rmtree(repository, ignore_errors=True)
    for name, (inputs, outputs) in SPECS.items():
        (repository / name / "1").mkdir(parents=True)
        shutil.copy(SERVERS / "triton_model.py", repository / name / "1" / "model.py")
        shutil.copy(SERVERS / "sessions.py", repository / name / "1")
        lines = [f'name: "{name}" backend: "python" max_batch_size: {MAX_ROWS} dynamic_batching {{}}']
        lines.append(f"instance_group {{ count: {instances} kind: KIND_CPU }}")
        lines.append(f'parameters {{ key: "file" value {{ string_value: "{model(name)}" }} }}')
        for kind, specs in (("input", inputs), ("output", outputs)):
            for spec in specs:
                tensor = f'name: "{spec.name}" data_type: {_TRITON_TYPES[spec.datatype]} dims: {list(spec.shape[1:])}'
                lines.append(f"{kind} {{ {tensor} }}")
        (repository / name / "config.pbtxt").write_text("\n".join(lines))
    site = HOME / "triton" / "lib" / "python3.11" / "site-packages"
    command = [str(site / "pytriton" / "tritonserver" / "bin" / "tritonserver"), f"--model-repository={repository}"]
    command += [f"--backend-directory={HOME / 'triton' / 'backends'}", "--allow-http=false", "--allow-metrics=false"]
    command += ["--grpc-address=127.0.0.1", f"--grpc-port={port}"]
    environment = {**_ENVIRONMENT, "LD_LIBRARY_PATH": str(site / "nvidia_pytriton.libs")}
    # Where the Python that it embeds finds its packages.
    environment["PATH"] = f"{HOME / 'triton' / 'bin'}:{environment['PATH']}"
    return Start(command, environment)


def _mlserver(port: int, other: int) -> Start:
    directory = WORK / "mlserver"
    shutil.rmtree(directory, ignore_errors=True)
    for name in SPECS:
        (directory / name).mkdir(parents=True)
        settings = {"name": name, "implementation": "mlserver_model.Onnx", "parameters": {"uri": str(model(name))}}
        (directory / name / "model-settings.json").write_text(json.dumps(settings))
    # Without workers of its own it is faster here than with one. Its variables count for less than this file.
    settings = {"host": "127.0.0.1", "http_port": other, "grpc_port": port, "parallel_workers": 0}
    settings |= {"metrics_endpoint": None, "debug": False}
    (directory / "settings.json").write_text(json.dumps(settings))
    return Start([str(HOME / "mlserver" / "bin" / "mlserver"), "start", str(directory)], _ENVIRONMENT, directory)


def _kserve(port: int, other: int) -> Start:
    command = [_python("kserve"), str(SERVERS / "kserve_server.py"), *_MODELS]
    return Start([*command, f"--grpc_port={port}", f"--http_port={other}"], _ENVIRONMENT)


def _litserve(port: int, other: int) -> Start:
    return Start([_python("litserve"), str(SERVERS / "litserve_server.py"), str(port), *_MODELS], _ENVIRONMENT)


def _bentoml(port: int, other: int) -> Start:
    command = [str(HOME / "bentoml" / "bin" / "bentoml"), "serve", "bentoml_service:Onnx", "--host=127.0.0.1"]
    models = {f"MODEL_{name.upper()}": str(model(name)) for name in SPECS}
    quiet = {"BENTOML_CONFIG_OPTIONS": "api_server.logging.access.enabled=false", "BENTOML_DO_NOT_TRACK": "1"}
    quiet |= {"BENTOML_HOME": str(WORK / "bentoml")}
    return Start([*command, f"--port={port}"], {**_ENVIRONMENT, **models, **quiet}, SERVERS)


def _peer(name: str, start: Callable[[int, int], Start], environment: str, http: bool = False) -> Recipe:
    return Recipe(name, start, http, environment, f"deploy/peers/install.sh {environment}")


def recipes() -> list[Recipe]:
    """All servers, ours first."""
    explicit = [Recipe(f"fewheads, --transport {name}", _ours(f"--transport={name}")) for name in TRANSPORTS]
    explicit.append(Recipe("fewheads, 1 instance on nghttp2", _ours("--transport=nghttp2", "--instances=1")))
    return [
        Recipe(OURS, _ours()),
        *(explicit if find_spec("ngh2") else []),
        Recipe("fewheads, the MLP alone", _ours(repository="small"), models=("mlp",)),
        Recipe("bare grpcio, 4 threads", _bare),
        _peer("Triton, Python backend", partial(_triton, 1), "triton"),
        _peer("Triton, 2 instances", partial(_triton, 2), "triton"),
        _peer("MLServer", _mlserver, "mlserver"),
        _peer("KServe SDK", _kserve, "kserve"),
        _peer("LitServe (HTTP)", _litserve, "litserve", http=True),
        _peer("BentoML (HTTP)", _bentoml, "bentoml", http=True),
    ]
