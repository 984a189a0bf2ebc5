"""Bad expressions and tokens: each is refused with its place, and the requests and rows beside it are answered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from edge.datatypes import Array
from edge.server import Ready
from tests.support.http_requests import INFER, ask, tensor
from tests.support.models import ORACLE
from tests.support.sample_requests import TEXTS, TRUTH, column, triton_input
from tests.support.server_models import Stub, busy

TOKENS = np.full((3, 15), 0.5, np.float32)
INPUT = {"expression": column(*TEXTS), "x": TOKENS}


def tokens(value: float) -> Array:
    changed = TOKENS.copy()
    changed[1, 4] = value
    return changed


#: An input, and its refusal.
BAD = (
    (column("1 + "), "expression: got '1 + ', expected an operand at the end. Write operands joined by + or -, for"),
    (column(""), "expression: got '', expected an operand at the end."),
    (column("1", "1 \u2212 2"), "in row 2: got '1 \u2212 2', expected + or - at character 3. Write '-' instead of"),
    (column("2 + \uff13"), "expected an operand at character 5. Write '3' instead of '\uff13' (U+FF13)."),
    (column("1e999"), "expression: got '1e999', expected + or - at character 2."),
    (column("9" * 400), "(400 characters), expected at most 256 characters."),
    (column("1 - 1025"), "expected operands between -1024 and 1024. Replace 1025 at character 5; the model was made"),
    (column("1", "2", b"3 \xff"), "text in input 'expression' element 3: got b'3 \\xff', expected UTF-8. Encode it as"),
    *(
        (
            tokens(value),
            f"input 'x' row 2 column 5 of 'calculator-oracle': got {shown}, expected a number between -1024 and 1024.",
        )
        for value, shown in ((np.nan, "nan"), (-np.inf, "-inf"), (3e38, "3e+38"), (1025, "1025"))
    ),
)


@pytest.fixture(scope="module")
def clients(server: Ready) -> Iterator[tuple[Any, Any]]:
    with (
        triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as grpc_client,
        triton_http.InferenceServerClient(f"127.0.0.1:{server.http_port}") as http_client,
    ):
        yield grpc_client, http_client


def infer(client: Any, values: Array) -> Array:
    module = triton if isinstance(client, triton.InferenceServerClient) else triton_http
    name = "expression" if values.dtype == np.object_ else "x"
    answer: Array = client.infer(ORACLE, [triton_input(name, values, module)]).as_numpy("value")
    return answer


def test_bad_input_is_refused_with_its_place(clients: tuple[Any, Any]) -> None:
    assert infer(clients[0], TOKENS).shape == infer(clients[1], TOKENS).shape == (3, 1)  # later ones are of this form
    for values, message in BAD:
        for client, status in zip(clients, ("StatusCode.INVALID_ARGUMENT", "400"), strict=True):
            with pytest.raises(InferenceServerException) as refused:
                infer(client, values)
            assert refused.value.status() == status
            assert message in refused.value.message()


def test_numbers_of_json_that_are_too_large_are_refused(server: Ready) -> None:
    url = f"127.0.0.1:{server.http_port}"
    for text, message in (
        ("1e999", "input 'x' row 2 column 5 of 'calculator-oracle': got inf"),
        ("9" * 400, "an element of input 'x': got 999"),
        ("1025", "input 'x' row 2 column 5 of 'calculator-oracle': got 1025"),
    ):
        body = json.dumps({"inputs": [tensor("x", "FP32", [3, 15], tokens(7.0).tolist())]}).replace("7.0", text)
        heard = ask(url, INFER, body.encode())
        assert (heard.status, message in heard.error) == (400, True), heard.body


def test_neighbours_of_bad_input_are_answered(
    clients: tuple[Any, Any], stub: Stub, take: Callable[[float], int]
) -> None:
    grpc_client, _ = clients
    with ThreadPoolExecutor(16) as pool:
        # The only worker is busy, so that these wait together and are answered in one run.
        before = grpc_client.get_inference_statistics(ORACLE).model_stats[0]
        blocker = stub.ModelInfer.future(busy(take(2.0)))
        good = [pool.submit(infer, grpc_client, column(*TEXTS)) for _ in range(8)]
        for values, _ in BAD[::4]:
            with pytest.raises(InferenceServerException):
                infer(grpc_client, values)
        assert not blocker.done(), "the bad ones were to arrive while the good ones wait"
        for one in good:
            np.testing.assert_array_equal(one.result(), TRUTH)
        after = grpc_client.get_inference_statistics(ORACLE).model_stats[0]
        assert after.inference_count - before.inference_count == 8 * len(TEXTS)
        assert after.execution_count - before.execution_count < 8
