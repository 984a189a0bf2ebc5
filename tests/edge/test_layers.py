"""Which module may import what, read from the source: the arrows of the architecture, and Python 3.10 on the device."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, get_args

import pytest

import edge
from edge import tensorrt_builder

ROOT = Path(edge.__file__).parent.parent
GENERATED = "edge/pb/"
HEAVY = ("torch", "tensorrt", "tensorrt_rtx", "onnxruntime", "onnx", "pycuda")

#: Package to the only files of edge/ that may import it.
OWNERS = {
    "grpc": (
        "edge/client.py",
        "edge/aio_client.py",
        "edge/connection.py",
        "edge/credentials.py",
        "edge/grpc_server.py",
        "edge/health_servicer.py",
        "edge/http2/",
        "edge/servicers.py",
        "edge/load/sender.py",
        GENERATED,
    ),
    "grpc_health": ("edge/grpc_server.py", "edge/health_servicer.py"),
    "grpc_reflection": ("edge/grpc_server.py",),
    "ngh2": ("edge/http2/connection.py",),
    "prometheus_client": ("edge/metrics.py", "edge/board_metrics.py"),
    "onnxruntime": ("edge/onnxruntime_runner.py",),
    "tensorrt": (),  # by import_module only, see below
    "tensorrt_rtx": (),
    "torch": (),
    "onnx": (),
    "starlette": ("edge/rest.py", "edge/rest_endpoint.py"),
    "uvicorn": ("edge/rest_server.py",),
    "tritonclient": (),
    "export": (),
    "tests": (),
    "click": ("edge/__main__.py", "edge/cli/"),
    "rich": ("edge/cli/",),
}
#: The protocol's messages stop at the modules that translate them.
USERS_OF_MESSAGES = (
    "edge/wire.py",
    "edge/parameters.py",
    "edge/service.py",
    "edge/telemetry.py",
    "edge/window.py",
    "edge/shared_tensors.py",
    "edge/calls.py",
    "edge/express.py",
    "edge/streams.py",
    "edge/extensions.py",
    "edge/servicers.py",
    "edge/grpc_server.py",
    "edge/client.py",
    "edge/aio_client.py",
    "edge/connection.py",
    "edge/inference.py",
    "edge/rpcs.py",
    "edge/rest.py",
    "edge/rest_infer.py",
    "edge/rest_messages.py",
    "edge/load/sender.py",
    "edge/load/workload.py",
)
#: The workstation hands bundles over; it neither serves nor asks a server.
NOT_FOR_EXPORT = (
    "edge.grpc_server",
    "edge.servicers",
    "edge.client",
    "edge.aio_client",
    "edge.connection",
    "edge.fleet",
    "edge.rest",
    "edge.rest_server",
    "edge.server",
    "edge.service",
    "edge.repository",
    "edge.scheduler",
    "edge.metrics",
    "edge.telemetry",
    "edge.launch",
    "edge.bench",
    "edge.goodput",
    "edge.load",
    "edge.pb",
)
#: Names that the standard library has only since Python 3.11 or later.
TOO_NEW_MODULES = {"tomllib", "wsgiref.types", "compression", "annotationlib"}
TOO_NEW_NAMES = {
    "BaseExceptionGroup",
    "EnumCheck",
    "ExceptionGroup",
    "LiteralString",
    "Never",
    "NotRequired",
    "Required",
    "ReprEnum",
    "Self",
    "StrEnum",
    "TaskGroup",
    "TypeVarTuple",
    "Unpack",
    "add_note",
    "assert_never",
    "assert_type",
    "batched",
    "dataclass_transform",
    "file_digest",
    "override",
    "reveal_type",
}
TOO_NEW_ATTRIBUTES = {
    "asyncio.Barrier",
    "asyncio.Runner",
    "asyncio.timeout",
    "asyncio.timeout_at",
    "contextlib.chdir",
    "datetime.UTC",
    "enum.member",
    "enum.nonmember",
    "enum.verify",
    "hashlib.file_digest",
    "sys.exception",
}


class Import(NamedTuple):
    """One imported module: where, and whether only when a function runs or only for type checkers."""

    file: str
    line: int
    module: str
    lazy: bool
    typing: bool

    def is_of(self, package: str) -> bool:
        return self.module == package or self.module.startswith(f"{package}.")


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


EDGE = sources("edge")
EXPORT = sources("export")
WRITTEN = [path for path in EDGE if not path.relative_to(ROOT).as_posix().startswith(GENERATED)]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), filename=str(path), feature_version=(3, 10))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> Iterator[Import]:
    yield from _imports(tree_of(path), name_of(path), False, False)


def _imports(node: ast.AST, file: str, lazy: bool, typing: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(file, child.lineno, alias.name, lazy, typing)
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, f"{file}:{child.lineno}: a relative import"
            yield Import(file, child.lineno, str(child.module), lazy, typing)
            # `from edge import errors` imports a module, `from edge.errors import shown` a name of one.
            for alias in child.names:
                if _is_module(f"{child.module}.{alias.name}"):
                    yield Import(file, child.lineno, f"{child.module}.{alias.name}", lazy, typing)
        elif isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            for part in child.body:
                yield from _imports(ast.Module([part], []), file, lazy, True)
            for part in child.orelse:
                yield from _imports(ast.Module([part], []), file, lazy, typing)
        else:
            inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, file, inside, typing)


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imports(files: list[Path]) -> list[Import]:
    return [found for path in files for found in imports_of(path)]


def at_import(files: list[Path]) -> dict[str, set[str]]:
    """Module to the modules of ours that it imports while it is imported itself."""
    graph: dict[str, set[str]] = {module_of(path): set() for path in files}
    for path in files:
        for found in imports_of(path):
            if not found.lazy and not found.typing and found.is_of("edge") and found.module != "edge":
                graph[module_of(path)].add(found.module)
    return graph


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        module = todo.pop()
        todo += sorted(graph.get(module, set()) - seen)
        seen |= graph.get(module, set())
    return seen


def test_the_sources_are_found() -> None:
    assert {"edge/errors.py", "edge/cli/serve.py", "edge/pb/inference_pb2.py"} <= {name_of(path) for path in EDGE}
    assert Import("edge/golden.py", 1, "numpy", False, False).module in {found.module for found in imports(EDGE)}
    lazy = {(found.file, found.module) for found in imports(EDGE) if found.lazy or found.typing}
    assert ("edge/onnxruntime_runner.py", "onnxruntime") in lazy
    assert ("edge/cli/infer.py", "edge.client") in lazy


@pytest.mark.parametrize("package", OWNERS)
def test_only_its_owners_import_a_package(package: str) -> None:
    strangers = [
        found for found in imports(EDGE) if found.is_of(package) and not found.file.startswith(OWNERS[package])
    ]
    assert not strangers


@pytest.mark.parametrize("package", OWNERS)
def test_every_owner_uses_its_package(package: str) -> None:
    for owner in OWNERS[package]:
        assert [found for found in imports(EDGE) if found.is_of(package) and found.file.startswith(owner)], owner


def test_heavy_packages_are_imported_only_when_they_are_used() -> None:
    eager = [f for f in imports(EDGE) if any(f.is_of(heavy) for heavy in HEAVY) and not f.lazy and not f.typing]
    assert not eager


def test_imports_by_name() -> None:
    """TensorRT is imported by a string, so that import must be found too, and there is no other."""
    ways = {"import_module", "__import__", "load", "spec_from_file_location", "exec", "eval", "run_module", "run_path"}
    found = {}
    for path in EDGE:
        calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
        for call in calls:
            function = call.func
            name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
            if name in ways:
                found[name_of(path), ast.unparse(call)] = name
    assert set(found) == {
        ("edge/tensorrt_builder.py", "import_module(flavor)"),
        ("edge/__main__.py", "point.load()"),  # the commands' entry points
        *((file, call) for file, call in found if call.startswith("np.load(")),
    }
    assert set(get_args(tensorrt_builder.Flavor)) == {"tensorrt", "tensorrt_rtx"}


def test_errors_and_datatypes_are_leaves() -> None:
    ours = {(found.file, found.module) for found in imports(EDGE) if found.is_of("edge")}
    assert not [module for file, module in ours if file in ("edge/errors.py", "edge/datatypes.py")]


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = at_import(WRITTEN)
    assert not [module for module in graph if module in reached(graph, module)]


def test_only_translators_see_the_protocols_messages() -> None:
    users = {f.file for f in imports(EDGE) if f.is_of("edge.pb") and not f.file.startswith(GENERATED)}
    assert users == set(USERS_OF_MESSAGES)


def test_nothing_but_the_command_line_imports_commands() -> None:
    users = {found.file for found in imports(EDGE) if found.is_of("edge.cli")}
    assert all(file.startswith("edge/cli/") for file in users)


def test_only_the_composition_root_knows_the_transport() -> None:
    assert {f.file for f in imports(EDGE) if f.is_of("edge.grpc_server")} == {"edge/server.py", "edge/http2/server.py"}
    # The rest of it is known to no one else.
    assert {f.file for f in imports(EDGE) if f.is_of("edge.http2.server")} == {"edge/server.py"}
    assert {f.file for f in imports(EDGE) if f.is_of("edge.rest_server")} == {"edge/server.py"}
    assert {f.file for f in imports(EDGE) if f.is_of("edge.rest")} == {"edge/server.py", "edge/rest_server.py"}
    endpoints = {"edge/grpc_server.py", "edge/http2/server.py", "edge/http2/rpc.py"}
    assert {f.file for f in imports(EDGE) if f.is_of("edge.servicers")} == {"edge/server.py", *endpoints}
    assert {f.file for f in imports(EDGE) if f.is_of("edge.metrics")} == {"edge/server.py"}


def test_export_never_serves() -> None:
    wrong = [f for f in imports(EXPORT) if f.is_of("grpc") or any(f.is_of(module) for module in NOT_FOR_EXPORT)]
    assert not wrong


def test_export_does_not_reach_the_server_on_a_detour() -> None:
    graph = at_import([*EDGE, *EXPORT])
    for path in EXPORT:
        for found in imports_of(path):
            wrong = (reached(graph, found.module) | {found.module}) & set(NOT_FOR_EXPORT)
            assert not wrong, f"{found.file}:{found.line} by {found.module}"


def test_tasks_and_the_calculator_do_not_know_each_other() -> None:
    for package, other in (("tasks", "calculator"), ("calculator", "tasks")):
        found = imports(sources(f"export/{package}"))
        assert found
        assert not [one for one in found if one.is_of(f"export.{other}")]


def test_one_place_reads_the_environment() -> None:
    readers = set()
    for path in [*EDGE, *EXPORT]:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv"):
                readers.add(name_of(path))
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                assert not {alias.name for alias in node.names} & {"environ", "environb", "getenv", "putenv"}
    assert readers == {"edge/cache.py"}


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_the_device_needs_no_newer_python_than_3_10(path: Path) -> None:
    compile(tree_of(path), str(path), "exec")
    assert not {found.module for found in imports_of(path)} & TOO_NEW_MODULES
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Name):
            assert node.id not in TOO_NEW_NAMES, node.lineno
        if isinstance(node, ast.Attribute):
            assert node.attr not in TOO_NEW_NAMES, node.lineno
            assert ast.unparse(node) not in TOO_NEW_ATTRIBUTES, node.lineno
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            assert not names & TOO_NEW_NAMES, node.lineno
            assert not {f"{node.module}.{name}" for name in names} & TOO_NEW_ATTRIBUTES, node.lineno


def imported_by(*modules: str) -> set[str]:
    """Return what is loaded in a new process that imported ``modules``."""
    code = f"import {', '.join(modules)}, sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_edge_imports_nothing_else() -> None:
    loaded = imported_by("edge")
    assert not {"numpy", "msgspec", "grpc", "click", *HEAVY} & loaded


def test_no_module_of_the_device_loads_a_runtime() -> None:
    modules = [module_of(path) for path in EDGE]
    loaded = imported_by(*modules)
    assert set(modules) <= loaded
    assert not set(HEAVY) & loaded


def test_models_and_commands_load_without_grpc() -> None:
    graph = at_import(EDGE)
    transport = {
        "edge.credentials",
        "edge.grpc_server",
        "edge.servicers",
        "edge.client",
        "edge.aio_client",
        "edge.connection",
        "edge.pb.inference_pb2_grpc",
        "edge.pb.telemetry_pb2_grpc",
        "edge.health_servicer",
        *(module for module in graph if module.startswith("edge.http2.")),
    }
    free = sorted(module for module in graph if not (reached(graph, module) | {module}) & transport)
    assert {"edge.build", "edge.model", "edge.service", "edge.repository", "edge.__main__"} <= set(free)
    assert {"edge.inference", "edge.retries", "edge.rotation", "edge.fleet"} <= set(free)
    assert {module for module in graph if module.startswith("edge.cli.")} <= set(free)
    assert "grpc" not in imported_by(*free)
