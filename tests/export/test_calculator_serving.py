"""All calculators behind one server, asked by a stock client."""

from contextlib import contextmanager

import numpy as np
import pytest
import tritonclient.grpc as triton

from edge.bundles.expression import tokenize
from edge.launch import running_server
from export.papers.calculator.specs import SPECS
from tests.support.calculators import LARGE, SMALL, untrained
from tests.support.sample_requests import column, triton_input

pytestmark = pytest.mark.timeout(900)  # of its first setup, which exports all of them where no test did

TEXTS = ("3 - -4 + 2", "-5 + 1", "7", "1 - 2 + 3 - 4 + 5 - 6 + 7 - 8")


@contextmanager
def served(bundles, cache):
    with (
        running_server(bundles, cache=cache) as ready,
        triton.InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client,
    ):
        yield client


@pytest.fixture(scope="module")
def client(calculator, tmp_path_factory):
    with served([calculator(name) for name in SMALL], tmp_path_factory.mktemp("cache")) as client:
        yield client


def check(name, client):
    answer = client.infer(name, [triton_input("expression", column(*TEXTS))]).as_numpy("value")
    tolerance = SPECS[name].tolerance
    np.testing.assert_allclose(
        answer, untrained(name).predict(tokenize(TEXTS)), atol=tolerance.atol, rtol=tolerance.rtol
    )


@pytest.mark.parametrize("name", SMALL)
def test_a_server_of_all_calculators_answers_as_torch(name, client):
    check(name, client)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_large_calculators_are_served_as_well(name, calculator, tmp_path):
    with served([calculator(name)], tmp_path) as client:
        check(name, client)
