"""The pages of faults and threats: every row is complete and names tests that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.documents import missing, names_tests, rows

HERE = Path(__file__).parent
PAGES = {"faults": HERE / "FAULTS.md", "threats": HERE.parents[1] / "deploy" / "THREATS.md"}


@pytest.mark.parametrize(("name", "columns", "enough"), [("faults", 3, 40), ("threats", 4, 15)])
def test_rows_are_complete_and_name_existing_tests(name: str, columns: int, enough: int) -> None:
    page = PAGES[name].read_text()
    assert len(rows(page)) > enough
    for row in rows(page):
        assert len(row) == columns
        assert all(cell.endswith(".") for cell in row[:2])
        assert names_tests(row[-1]), row[-1]
    assert not missing(page)
