"""No module of export/ imports itself through others, not even for types."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import export

ROOT = Path(export.__file__).parent.parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "export").rglob("*.py")
}


def imported(path):
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)


def test_imports_make_no_circle():
    graph = {module: {name for name in imported(path) if name in MODULES} for module, path in MODULES.items()}
    assert len(graph) > 60
    TopologicalSorter(graph).prepare()
