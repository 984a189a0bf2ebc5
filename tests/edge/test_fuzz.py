"""Ten thousand random and mutated ModelInfer requests: each gets a status, none harms the server."""

from __future__ import annotations

from collections import Counter

import grpc
import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from edge.pb import inference_pb2 as pb
from edge.server import Ready
from tests.edge.test_status_codes import ROWS
from tests.support.fuzzing import mutated, requests
from tests.support.sample_requests import good

EXAMPLES = 5000  # of each of the two kinds
#: Growth that is no leak: allocator pools, and counters of error kinds.
ALLOWED_GROWTH_BYTES = 24 * 2**20
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}

SEEDS = [row.request.SerializeToString() for row in ROWS if row.method == "ModelInfer"]


@pytest.mark.timeout(600)
def test_random_and_mutated_requests(server: Ready, url: str) -> None:
    seen: Counter[grpc.StatusCode] = Counter()
    process = psutil.Process(server.process_id)
    profile = settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    with grpc.insecure_channel(url) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

        def send(data: bytes) -> grpc.StatusCode:
            try:
                infer(data, timeout=10)
                return grpc.StatusCode.OK
            except grpc.RpcError as error:
                code: grpc.StatusCode = error.code()
                return code

        @profile
        @given(requests)
        def random_ones(request: pb.ModelInferRequest) -> None:
            code = send(request.SerializeToString())
            seen[code] += 1
            assert code in ALLOWED

        @profile
        @given(mutated(SEEDS))
        def mutated_ones(data: bytes) -> None:
            code = send(data)
            seen[code] += 1
            assert code in ALLOWED or (code is grpc.StatusCode.INTERNAL and not _parses(data))

        for data in SEEDS * 5:  # whatever grows once has grown before the memory is compared
            send(data)
        before = process.memory_info().rss
        random_ones()
        mutated_ones()
        assert process.memory_info().rss - before < ALLOWED_GROWTH_BYTES
        assert sum(seen.values()) >= 2 * EXAMPLES
        # A fuzzer that never gets through tests nothing.
        assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND} <= set(seen), seen
        assert infer(good().SerializeToString(), timeout=10)


def _parses(data: bytes) -> bool:
    try:
        pb.ModelInferRequest.FromString(data)
    except Exception:
        return False
    return True
