"""The page of faults: whole, and true as far as names go."""

from __future__ import annotations

from pathlib import Path

from tests.support.documents import missing, names_tests, rows

PAGE = (Path(__file__).parent / "FAULTS.md").read_text()


def test_the_page_is_whole() -> None:
    assert len(rows(PAGE)) > 40
    for row in rows(PAGE):
        assert len(row) == 3
        fault, held, shown = row
        assert fault.endswith(".")
        assert held.endswith(".")
        assert names_tests(shown), shown


def test_the_tests_that_it_names_exist() -> None:
    assert not missing(PAGE)
    assert missing("`test_zz.py`, `test_faults.py`, `test_faults.py::test_zz`") == [
        "test_zz.py::",
        "test_faults.py::test_zz",
    ]
