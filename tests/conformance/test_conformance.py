"""The same questions to a real Triton and to this server on each of its transports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edge.settings import TRANSPORTS
from tests.conformance.case import Case
from tests.conformance.differences import PAGE, render
from tests.conformance.peer import Peer
from tests.conformance.servers import NO_TRITON, is_installed, ours, triton
from tests.conformance.table import TABLE

CASES = [case for part in TABLE.values() for case in part]
TRITON = pytest.param("triton", marks=[pytest.mark.triton, pytest.mark.skipif(not is_installed(), reason=NO_TRITON)])


@pytest.fixture(scope="module", params=[*TRANSPORTS, TRITON])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Peer]]:
    name: str = request.param
    directory = tmp_path_factory.mktemp(name)
    with triton(directory) if name == "triton" else ours(directory, name) as url:
        yield name, Peer(url)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(server: tuple[str, Peer], case: Case) -> None:
    name, peer = server
    assert case.ask(peer) == (case.triton if name == "triton" else case.expected)


def test_every_case_has_its_name() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


def test_each_difference_has_a_reason_and_nothing_else_has() -> None:
    assert not [case.name for case in CASES if not case.triton]
    assert {case.name for case in CASES if case.ours} == {case.name for case in CASES if case.reason}
    assert not [case.name for case in CASES if case.ours == case.triton]


def test_the_page_tells_all_differences() -> None:
    assert PAGE.read_text() == render(), "python -m tests.conformance.differences"
