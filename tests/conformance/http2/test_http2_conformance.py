"""``fewheads serve --transport nghttp2`` against RFC 9113 and RFC 7541."""

from pathlib import Path

import grpc
import pytest

from edge.client.connection import open_stub
from edge.launch import running_server
from edge.pb import inference_pb2 as pb
from tests.conformance import check, differences
from tests.conformance.http2 import frames, requests
from tests.support.models import ORACLE_BUNDLE

CASES = [*frames.CASES, *requests.CASES]
PAGE = Path(__file__).with_name("DIFFERENCES.md")
DIFFERENCES = differences(PAGE)


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """A server that answers another client before and after all cases."""
    with (
        running_server(
            [ORACLE_BUNDLE], cache=tmp_path_factory.mktemp("cache"), arguments=["--transport=nghttp2", "--no-metrics"]
        ) as ready,
        grpc.insecure_channel(f"127.0.0.1:{ready.grpc_port}") as channel,
    ):
        stub = open_stub(channel)
        assert stub.ServerReady(pb.ServerReadyRequest(), timeout=10).ready
        yield ready.grpc_port
        assert stub.ServerReady(pb.ServerReadyRequest(), timeout=10).ready


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_case(port, case):
    _, expected = DIFFERENCES.get(case.name, ("", case.outcome))
    assert await case.observe(port, expected) == expected


def test_the_page_lists_all_differences():
    check(PAGE, [case.name for case in CASES], [case.name for case in CASES if case.outcome])
