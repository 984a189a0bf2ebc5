"""The same cases for a real Triton and for this server on each gRPC transport."""

from pathlib import Path

import pytest

from edge.settings import TRANSPORTS
from tests.conformance import check, control, differences, inferences, metadata, shared_memory, streams
from tests.conformance.peer import Peer
from tests.conformance.servers import IS_INSTALLED, NO_TRITON, ours, triton

CASES = [*metadata.CASES, *inferences.CASES, *streams.CASES, *shared_memory.CASES, *control.CASES]
PAGE = Path(__file__).with_name("DIFFERENCES.md")
DIFFERENCES = differences(PAGE)
TRITON = pytest.param("triton", marks=[pytest.mark.triton, pytest.mark.skipif(not IS_INSTALLED, reason=NO_TRITON)])


@pytest.fixture(scope="module", params=[*TRANSPORTS, TRITON])
def server(request, tmp_path_factory):
    name = request.param
    directory = tmp_path_factory.mktemp(name)
    with triton(directory) if name == "triton" else ours(directory, name) as url:
        yield name, Peer(url)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(server, case):
    name, peer = server
    of_triton, of_ours = DIFFERENCES.get(case.name, (case.outcome, case.outcome))
    outcome = case.action(peer)
    assert outcome == (of_triton if name == "triton" else of_ours)
    if name != "triton" and case.text:
        details = getattr(outcome, "details", "")
        assert case.text in details
        assert len(details) < 2000
        if of_ours != "INTERNAL":
            assert "expected " in details


def test_the_page_lists_all_differences():
    check(PAGE, [case.name for case in CASES], [case.name for case in CASES if case.outcome])
