"""Tables in documents whose rows name tests, and a check that these tests exist."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

_HERE = Path(__file__).parent.parent / "edge"
_NAME = r"`(test_\w+\.py)(?:::(test_\w+))?`"


def rows(page: str) -> list[list[str]]:
    """Return the cells of each row of a page's tables, without their heads."""
    lines = page.splitlines()
    heads = [before for before, line in pairwise(lines) if line.startswith("| ---")]
    body = [line for line in lines if line.startswith("| ") and not line.startswith("| ---") and line not in heads]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body]


def names_tests(cell: str) -> bool:
    """Return whether a cell holds names of tests, separated by commas, and nothing else."""
    return bool(re.fullmatch(f"{_NAME}(, {_NAME})*", cell))


def missing(page: str) -> list[str]:
    return [f"{file}::{name}" for file, name in re.findall(_NAME, page) if not _exists(file, name)]


def _exists(file: str, name: str) -> bool:
    folders = (_HERE, _HERE.parent / "deploy", _HERE.parent / "attacks")
    path = next((folder / file for folder in folders if (folder / file).exists()), None)
    if path is None:
        return False
    tree = ast.parse(path.read_text())
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return name in found if name else any(one.startswith("test_") for one in found)
