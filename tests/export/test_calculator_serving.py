"""All calculators behind one server, asked by a stock client."""

import numpy as np
import pytest
import tritonclient.grpc as triton

from edge.bundles.expression import tokenize
from edge.launch import running_server
from export.calculator.specs import SPECS
from tests.support.calculators import SMALL, untrained
from tests.support.sample_requests import column, triton_input

pytestmark = pytest.mark.timeout(900)  # of its first setup, which exports all of them where no test did

TEXTS = ("3 - -4 + 2", "-5 + 1", "7", "1 - 2 + 3 - 4 + 5 - 6 + 7 - 8")


@pytest.fixture(scope="module")
def client(calculator, tmp_path_factory):
    bundles = [calculator(name) for name in SMALL]
    with (
        running_server(bundles, cache=tmp_path_factory.mktemp("cache")) as ready,
        triton.InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client,
    ):
        yield client


@pytest.mark.parametrize("name", SMALL)
def test_a_server_of_all_calculators_answers_as_torch(name, client):
    answer = client.infer(name, [triton_input("expression", column(*TEXTS))]).as_numpy("value")
    tolerance = SPECS[name].tolerance
    np.testing.assert_allclose(
        answer, untrained(name).predict(tokenize(TEXTS)), atol=tolerance.atol, rtol=tolerance.rtol
    )
