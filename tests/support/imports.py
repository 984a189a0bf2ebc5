"""Imports of the sources of edge/ and export/, and the order of their packages.

Imports for type checkers count like all others, because readers follow them too. Only loads in a new process
leave them out.
"""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

import edge

ROOT = Path(edge.__file__).parent.parent
GENERATED = "edge/pb/"

#: The packages and modules of edge/ from the ground up: each may import those before it, and none after it.
ORDER = (
    *("errors", "protocol", "datatypes", "files", "child", "instruments", "pb", "runner", "bundles", "runtimes"),
    *("security", "connections", "http", "programs", "scheduling", "repository", "health", "serving"),
    *("telemetry", "rpc", "grpcio", "http2", "rest", "client", "page_settings", "settings", "assembly", "exporter"),
    *("server", "launch", "bench", "cli", "__main__"),
)
#: The rooms of export/: a room imports those before it, so no verb imports a paper, and the commands come last.
EXPORT_ORDER = (
    *("errors", "training", "models", "data", "quantize", "finetune", "importing", "estimate", "bundle", "reduce"),
    *("report", "generate", "papers", "cli"),
)
#: What every room may use of report/, and what uses nothing of rooms but training/.
EXPORT_LEAVES = {"export.report.card", "export.report.drawing", "export.report.table"}


class Import(NamedTuple):
    """One imported module: where, and whether only when a function runs or only for type checkers."""

    file: str
    line: int
    module: str
    lazy: bool
    typing: bool

    def is_of(self, package):
        return self.module == package or self.module.startswith(f"{package}.")


def sources(package):
    return sorted((ROOT / package).rglob("*.py"))


EDGE, EXPORT = sources("edge"), sources("export")
WRITTEN = [path for path in EDGE if not path.relative_to(ROOT).as_posix().startswith(GENERATED)]


@cache
def tree_of(path):
    return ast.parse(path.read_bytes(), filename=str(path))


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def part_of(module):
    return module.split(".")[1] if "." in module else ""


def _imports(node, file, lazy, typing):
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
            yield from _imports(ast.Module(child.body, []), file, lazy, True)
            yield from _imports(ast.Module(child.orelse, []), file, lazy, typing)
        else:
            inside_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, file, lazy or inside_function, typing)


def _is_module(name):
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@cache
def _imports_of(path):
    return list(_imports(tree_of(path), name_of(path), False, False))


def imports(files):
    return [found for path in files for found in _imports_of(path)]


def graph_of(files, *, only_at_import=False):
    """Return module to the modules of edge/ and export/ that it imports; ``only_at_import``: that it loads at once."""
    graph = {module_of(path): set() for path in files}
    for path in files:
        for found in _imports_of(path):
            counts = not only_at_import or not (found.lazy or found.typing)
            if counts and (found.is_of("edge") or found.is_of("export")) and found.module not in ("edge", "export"):
                graph[module_of(path)].add(found.module)
    return graph


def reached(graph, start):
    seen = set()
    todo = [start]
    while todo:
        module = todo.pop()
        todo += sorted(graph.get(module, set()) - seen)
        seen |= graph.get(module, set())
    return seen
