"""Import rules of the architecture, read from the sources.

Imports for type checkers count like all others, because a reader has to follow them too. Only what is loaded in a new
process leaves them out.
"""

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
from edge.runtimes import tensorrt_package
from edge.runtimes.table import RUNTIMES

ROOT = Path(edge.__file__).parent.parent
GENERATED = "edge/pb/"
HEAVY = ("torch", "tensorrt", "tensorrt_rtx", "onnxruntime", "onnx", "pycuda", "opentelemetry")

#: The packages and modules of edge/ from the ground up: each may import those before it, and none after it.
ORDER = (
    "errors",
    "protocol",
    "datatypes",
    "files",
    "instruments",
    "pb",
    "runner",
    "bundles",
    "runtimes",
    "security",
    "profiling",
    "programs",
    "scheduling",
    "repository",
    "health",
    "serving",
    "telemetry",
    "rpc",
    "grpcio",
    "http2",
    "rest",
    "client",
    "settings",
    "assembly",
    "server",
    "launch",
    "load",
    "cli",
    "__main__",
)
#: Package to the only parts of edge/ that may import it.
OWNERS = {
    "grpc": (
        "edge/client/",
        "edge/security/credentials.py",
        "edge/rpc/",
        "edge/grpcio/",
        "edge/http2/",
        "edge/load/sender.py",
        GENERATED,
    ),
    "grpc_health": ("edge/rpc/",),
    "grpc_reflection": ("edge/rpc/",),
    "ngh2": ("edge/settings.py", "edge/http2/"),
    "prometheus_client": ("edge/telemetry/metrics.py",),
    "opentelemetry": ("edge/serving/traces.py",),
    "onnxruntime": ("edge/runtimes/onnxruntime_runner.py",),
    "pycuda": ("edge/runtimes/cuda.py",),
    "tensorrt": (),  # by import_module only, see below
    "tensorrt_rtx": (),
    "torch": (),
    "onnx": (),
    "starlette": ("edge/rest/",),
    "uvloop": ("edge/cli/serve.py",),
    "uvicorn": ("edge/rest/server.py",),
    "tritonclient": (),
    "export": (),
    "tests": (),
    "click": ("edge/__main__.py", "edge/cli/"),
    "rich": ("edge/cli/",),
}
#: They name packages that have the names of runtimes.
OWNERS_OF_RUNTIME_PACKAGES = {
    "edge/runtimes/onnxruntime_runner.py",
    "edge/runtimes/tensorrt_package.py",
}
#: The protocol's messages stop where they are translated.
USERS_OF_MESSAGES = {"serving", "telemetry", "rpc", "rest", "client", "load"}
#: All that the workstation needs of the device's half: it hands bundles over, and neither serves nor asks a server.
FOR_EXPORT = (
    "errors",
    "datatypes",
    "files",
    "runner",
    "bundles",
    "runtimes",
    "instruments",
    "profiling",
    "programs",
    "cli",
)


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
            # `from edge import errors` imports a module, `from edge.errors import shown` a name of one.
            inside = {f"{child.module}.{alias.name}" for alias in child.names}
            modules = {name for name in inside if _is_module(name)}
            for module in sorted(modules | ({str(child.module)} if inside - modules else set())):
                yield Import(file, child.lineno, module, lazy, typing)
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


def graph_of(files: list[Path], *, lazy: bool = True, typing: bool = True) -> dict[str, set[str]]:
    """Module to the modules of edge/ and export/ that it imports.

    Args:
        files: the modules.
        lazy: whether imports inside functions count.
        typing: whether imports for type checkers count.
    """
    graph: dict[str, set[str]] = {module_of(path): set() for path in files}
    for path in files:
        for found in imports_of(path):
            counts = (lazy or not found.lazy) and (typing or not found.typing)
            if counts and (found.is_of("edge") or found.is_of("export")) and found.module not in ("edge", "export"):
                graph[module_of(path)].add(found.module)
    return graph


def at_import(files: list[Path]) -> dict[str, set[str]]:
    """Module to the modules of edge/ and export/ that are loaded while it is imported itself."""
    return graph_of(files, lazy=False, typing=False)


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
    assert Import("edge/bundles/golden.py", 1, "numpy", False, False).module in {
        found.module for found in imports(EDGE)
    }
    lazy = {(found.file, found.module) for found in imports(EDGE) if found.lazy or found.typing}
    assert ("edge/runtimes/onnxruntime_runner.py", "onnxruntime") in lazy
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
        ("edge/runtimes/tensorrt_package.py", "import_module(flavor)"),
        ("edge/__main__.py", "point.load()"),  # the commands' entry points
        ("edge/client/__init__.py", "import_module(f'{__name__}.{_HOMES[name]}')"),
        # Arrays and models are no modules.
        *(one for one in found if one[1].startswith(("np.load(", "runtime.load(", "super().load("))),
    }
    assert set(get_args(tensorrt_package.Flavor)) == {"tensorrt", "tensorrt_rtx"}


def part_of(module: str) -> str:
    """Return the package or module of edge/ that a module is in."""
    return module.split(".")[1] if "." in module else ""


def test_every_part_of_edge_has_its_place() -> None:
    assert {part_of(module_of(path)) for path in EDGE} - {""} == set(ORDER)


def test_nothing_imports_what_stands_above_it() -> None:
    wrong = []
    for found in imports(EDGE):
        here, there = part_of(found.file.removesuffix(".py").replace("/", ".")), part_of(found.module)
        if found.is_of("edge") and there in ORDER and here in ORDER:
            wrong += [found] if ORDER.index(here) < ORDER.index(there) else []
    assert not wrong


def test_only_a_runtimes_own_file_names_it() -> None:
    """A new runtime changes its file and the table, because no other module asks which runtime it has."""
    own = {f"{runtime.__module__.replace('.', '/')}.py" for runtime in RUNTIMES.values()}
    own |= OWNERS_OF_RUNTIME_PACKAGES
    named = [
        (name_of(path), node.lineno, node.value)
        for path in WRITTEN
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and names_a_runtime(node.value)
    ]
    assert own == {file for file, _, _ in named}


def names_a_runtime(text: str) -> bool:
    return text.partition(":")[0] in RUNTIMES and " " not in text


def test_errors_and_datatypes_are_leaves() -> None:
    ours = {(found.file, found.module) for found in imports(EDGE) if found.is_of("edge")}
    assert not [module for file, module in ours if file in ("edge/errors.py", "edge/datatypes.py")]


@pytest.mark.parametrize("package", ["edge", "export"])
def test_no_module_imports_itself_in_a_circle(package: str) -> None:
    graph = graph_of({"edge": WRITTEN, "export": EXPORT}[package])
    assert not [module for module in graph if module in reached(graph, module)]


def test_only_translators_see_the_protocols_messages() -> None:
    users = {f.file for f in imports(EDGE) if f.is_of("edge.pb") and not f.file.startswith(GENERATED)}
    assert {file.split("/")[1] for file in users} == USERS_OF_MESSAGES


def test_nothing_but_the_command_line_imports_commands() -> None:
    users = {found.file for found in imports(EDGE) if found.is_of("edge.cli")}
    assert all(file.startswith("edge/cli/") for file in users)


@pytest.mark.parametrize("transport", ["grpcio", "http2", "rest"])
def test_only_the_composition_root_knows_a_transport(transport: str) -> None:
    users = {found.file for found in imports(EDGE) if found.is_of(f"edge.{transport}")}
    assert {file for file in users if not file.startswith(f"edge/{transport}/")} == {"edge/assembly.py"}


def test_export_never_serves() -> None:
    wrong = [f for f in imports(EXPORT) if f.is_of("grpc") or (f.is_of("edge") and not is_for_export(f.module))]
    assert not wrong


def test_export_does_not_reach_the_server_on_a_detour() -> None:
    graph = at_import([*EDGE, *EXPORT])
    for path in EXPORT:
        for found in imports_of(path):
            wrong = {m for m in reached(graph, found.module) if m.startswith("edge.") and not is_for_export(m)}
            assert not wrong, f"{found.file}:{found.line} by {found.module}"


def is_for_export(module: str) -> bool:
    return part_of(module) in ("", "__version__", *FOR_EXPORT)


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
    assert readers == {"edge/runtimes/cache.py", "edge/health/systemd.py", "edge/cli/checks.py"}


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
    transport = {module_of(ROOT / f.file) for f in imports(EDGE) if f.is_of("grpc") and not f.lazy and not f.typing}
    free = sorted(module for module in graph if not (reached(graph, module) | {module}) & transport)
    assert {
        "edge.runtimes.build",
        "edge.repository.model",
        "edge.serving.inference",
        "edge.serving.metadata",
        "edge.repository.repository",
        "edge.__main__",
    } <= set(free)
    assert {
        "edge.client.inference",
        "edge.client.retries",
        "edge.client.round_robin",
        "edge.client.server_pool",
    } <= set(free)
    assert {module for module in graph if module.startswith("edge.cli.")} <= set(free)
    assert "grpc" not in imported_by(*free)
