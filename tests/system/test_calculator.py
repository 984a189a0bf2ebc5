"""From training to a served answer, through every real joint, on every item of the data."""

import json

import numpy as np
import pytest
import tritonclient.grpc as triton

from edge.bundles.bundle import Bundle
from edge.launch import running_server
from export.data import expressions as data
from tests.support.commands import answer, fewheads
from tests.support.sample_requests import column, triton_input

MODELS = ("calculator-oracle", "calculator-gate")
BATCH = 256


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def repository(work):
    answer(fewheads("train", *MODELS, "--seed=1", "--out", work / "runs"))
    answer(fewheads("export", *(work / "runs" / model for model in MODELS), "--repository", work / "repository"))
    return work / "repository"


@pytest.fixture(scope="module")
def server(work, repository):
    built = answer(fewheads("build", *sorted(repository.iterdir()), "--cache", work / "cache", "--json"))
    assert all(one["build"]["golden"]["outputs"][0]["passed"] for one in json.loads(built))
    with running_server(sorted(repository.iterdir()), cache=work / "cache") as ready:
        yield ready


def ask(server, model, split, tensor):
    values = []
    with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        for start in range(0, len(split.expressions), BATCH):
            part = slice(start, start + BATCH)
            sent = column(*split.expressions[part]) if tensor == "expression" else split.tokens[part]
            values.append(client.infer(model, [triton_input(tensor, sent)]).as_numpy("value")[:, 0])
    return np.concatenate(values)


@pytest.mark.parametrize("tensor", ["expression", "x"])
def test_the_oracle_is_exact_on_all_items(server, tensor):
    splits = data.load()
    assert sum(len(split.expressions) for split in splits.values()) == 6748
    for split in splits.values():
        assert np.abs(ask(server, "calculator-oracle", split, tensor) - split.truth).max() == 0.0


def test_the_gate_is_right_on_all_items_after_rounding(server):
    for split in data.load().values():
        answers = ask(server, "calculator-gate", split, "expression")
        np.testing.assert_array_equal(np.round(answers), split.truth)


def test_the_bundles_have_the_measured_accuracy(repository):
    for path in repository.iterdir():
        manifest = Bundle.open(path).manifest
        measured = {(measure.metric, measure.split): measure for measure in manifest.measures}
        for split, items in data.SIZES.items():
            if split != "train":
                assert measured["exact_match", split].n == items
                assert measured["exact_match", split].value == 1.0
        assert manifest.provenance.versions["torch"]
