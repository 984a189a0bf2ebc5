"""Import rules of the architecture, read from the sources."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.support.imports import (
    EDGE,
    EXPORT,
    GENERATED,
    ORDER,
    ROOT,
    WRITTEN,
    Import,
    graph_of,
    imports,
    module_of,
    name_of,
    part_of,
    reached,
    tree_of,
)

HEAVY = ("torch", "tensorrt", "tensorrt_rtx", "onnxruntime", "onnx", "pycuda", "opentelemetry", "matplotlib")
#: Package to the only parts of edge/ that may import it. TensorRT is imported by import_module only, see below.
OWNERS: dict[str, tuple[str, ...]] = {
    "grpc": (
        *("edge/client/", "edge/security/credentials.py", "edge/rpc/", "edge/grpcio/", "edge/http2/"),
        *("edge/load/sender.py", GENERATED),
    ),
    "grpc_health": ("edge/rpc/",),
    "grpc_reflection": ("edge/rpc/",),
    "ngh2": ("edge/settings.py", "edge/http2/"),
    "prometheus_client": ("edge/telemetry/metrics.py",),
    "opentelemetry": ("edge/serving/traces.py",),
    "onnxruntime": ("edge/runtimes/onnxruntime_runner.py",),
    "pycuda": ("edge/runtimes/cuda.py",),
    "starlette": ("edge/rest/",),
    "uvloop": ("edge/cli/serve.py",),
    "uvicorn": ("edge/rest/server.py",),
    "matplotlib": ("edge/load/plot.py",),
    "click": ("edge/__main__.py", "edge/cli/"),
    "rich": ("edge/cli/",),
    **dict.fromkeys(("tensorrt", "tensorrt_rtx", "torch", "onnx", "tritonclient", "export", "tests"), ()),
}
#: The packages that see the protocol's messages; others get tensors and plain values.
USERS_OF_MESSAGES = {"serving", "telemetry", "rpc", "rest", "client", "load"}
#: The parts of edge/ that the workstation uses: it writes bundles, and neither serves nor calls a server.
FOR_EXPORT = {
    *("", "__version__", "errors", "datatypes", "files", "runner", "bundles", "runtimes", "instruments", "profiling"),
    *("programs", "cli"),
}


def users_of(package: str) -> set[str]:
    return {found.file for found in imports(EDGE) if found.is_of(package)}


def test_packages_are_imported_by_their_owners_only() -> None:
    for package, owners in OWNERS.items():
        users = users_of(package)
        assert [file for file in users if not file.startswith(owners)] == []
        assert [owner for owner in owners if not any(file.startswith(owner) for file in users)] == []
    eager = [f for f in imports(EDGE) if any(f.is_of(heavy) for heavy in HEAVY) and not f.lazy and not f.typing]
    assert not eager


def test_no_part_of_edge_imports_a_later_one() -> None:
    assert {part_of(module_of(path)) for path in EDGE} - {""} == set(ORDER)

    def is_upward(found: Import) -> bool:
        here, there = part_of(found.file.removesuffix(".py").replace("/", ".")), part_of(found.module)
        return found.is_of("edge") and {here, there} <= set(ORDER) and ORDER.index(here) < ORDER.index(there)

    assert not [found for found in imports(EDGE) if is_upward(found)]
    leaves = ("edge/errors.py", "edge/datatypes.py")
    assert not [found for found in imports(EDGE) if found.file in leaves and found.is_of("edge")]


@pytest.mark.parametrize("files", [WRITTEN, EXPORT], ids=["edge", "export"])
def test_no_module_imports_itself_in_a_circle(files: list[object]) -> None:
    graph = graph_of(files)  # type: ignore[arg-type]
    assert not [module for module in graph if module in reached(graph, module)]


def test_messages_commands_and_transports_stay_in_their_packages() -> None:
    users = {file for file in users_of("edge.pb") if not file.startswith(GENERATED)}
    assert {file.split("/")[1] for file in users} == USERS_OF_MESSAGES
    assert all(file.startswith("edge/cli/") for file in users_of("edge.cli"))
    for transport in ("grpcio", "http2", "rest"):
        users = users_of(f"edge.{transport}")
        assert {file for file in users if not file.startswith(f"edge/{transport}/")} == {"edge/assembly.py"}


def test_export_reaches_no_part_of_the_server() -> None:
    graph = graph_of([*EDGE, *EXPORT], only_at_import=True)
    for found in imports(EXPORT):
        assert not found.is_of("grpc")
        modules = {found.module} | reached(graph, found.module)
        wrong = {module for module in modules if module.startswith("edge.") and part_of(module) not in FOR_EXPORT}
        assert not wrong, f"{found.file}:{found.line} by {found.module}"


def test_few_files_read_the_environment() -> None:
    names = {"environ", "environb", "getenv", "putenv"}
    readers = set()
    for path in [*EDGE, *EXPORT]:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr in names:
                readers.add(name_of(path))
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                assert not {alias.name for alias in node.names} & names
    assert readers == {"edge/runtimes/cache.py", "edge/health/systemd.py", "edge/cli/checks.py"}


def imported_by(*modules: str) -> set[str]:
    """Return the modules that a new process has loaded after it imported ``modules``."""
    code = f"import {', '.join(modules)}, sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_imports_load_no_runtime() -> None:
    assert not {"numpy", "msgspec", "grpc", "click", *HEAVY} & imported_by("edge")
    modules = [module_of(path) for path in EDGE]
    loaded = imported_by(*modules)
    assert set(modules) <= loaded
    assert not set(HEAVY) & loaded
