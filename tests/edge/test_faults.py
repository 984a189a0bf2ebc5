"""The pages of faults and threats: every row is complete and names tests that exist."""

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

_HERE = Path(__file__).parent.parent / "edge"
_NAME = r"`(test_\w+\.py)(?:::(test_\w+))?`"


def rows(page):
    """Return the cells of each row of a page's tables, without their heads."""
    lines = page.splitlines()
    heads = [before for before, line in pairwise(lines) if line.startswith("| ---")]
    body = [line for line in lines if line.startswith("| ") and not line.startswith("| ---") and line not in heads]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body]


def names_tests(cell):
    """Return whether a cell holds names of tests, separated by commas, and nothing else."""
    return bool(re.fullmatch(f"{_NAME}(, {_NAME})*", cell))


def missing(page):
    return [f"{file}::{name}" for file, name in re.findall(_NAME, page) if not _exists(file, name)]


def _exists(file, name):
    folders = (_HERE, *(_HERE.parent / name for name in ("deploy", "attacks", "conformance")))
    path = next((folder / file for folder in folders if (folder / file).exists()), None)
    if path is None:
        return False
    tree = ast.parse(path.read_text())
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return name in found if name else any(one.startswith("test_") for one in found)


HERE = Path(__file__).parent
PAGES = {"faults": HERE / "FAULTS.md", "threats": HERE.parents[1] / "deploy" / "THREATS.md"}


@pytest.mark.parametrize(("name", "columns", "enough"), [("faults", 3, 40), ("threats", 4, 15)])
def test_rows_are_complete_and_name_existing_tests(name, columns, enough):
    page = PAGES[name].read_text()
    assert len(rows(page)) > enough
    for row in rows(page):
        assert len(row) == columns
        assert all(cell.endswith(".") for cell in row[:2])
        assert names_tests(row[-1]), row[-1]
    assert not missing(page)
