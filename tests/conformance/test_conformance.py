"""The same cases for a real Triton and for this server on each gRPC transport."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edge.settings import TRANSPORTS
from tests.conformance.case import Case
from tests.conformance.differences import CASES, PAGE, render
from tests.conformance.peer import Peer
from tests.conformance.servers import NO_TRITON, is_installed, ours, triton

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
    outcome = case.action(peer)
    if name == "triton":
        assert outcome == case.triton
        return
    assert outcome == case.expected
    details = getattr(outcome, "details", "")
    assert case.text in details
    if case.text and case.expected != "INTERNAL":
        assert "got " in details
        assert "expected " in details
        assert len(details) < 2000


def test_names_are_unique_and_only_differences_have_a_reason() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert not [case.name for case in CASES if not case.triton or bool(case.ours) != bool(case.reason)]
    assert not [case.name for case in CASES if case.ours == case.triton]


def test_the_page_lists_all_differences() -> None:
    assert PAGE.read_text() == render(), "python -m tests.conformance.differences"
