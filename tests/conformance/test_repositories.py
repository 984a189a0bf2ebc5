"""A real Triton serves what ``export --triton`` writes, and Fewheads what ``pack --triton`` reads, alike."""

import shutil

import numpy as np
import pytest
import tritonclient.grpc as tritonclient

from edge.launch import running_server
from export.cli.export import export
from export.cli.pack import pack
from tests.conformance.servers import IS_INSTALLED, NO_TRITON, TRITON, serving_with_triton
from tests.support.embedder_model import write_embedder_bundle
from tests.support.sample_requests import triton_input
from tests.support.task_data import invoke
from tests.support.text_model import write_sentiment_bundle
from tests.support.triton_repository import write_repository

pytestmark = [pytest.mark.triton, pytest.mark.skipif(not IS_INSTALLED, reason=NO_TRITON)]

IDS = np.array([[2, 3, 4], [5, 5, 0]], np.int64)
TOKENS = {"input_ids": IDS, "attention_mask": (IDS > 0).astype(np.int64)}
#: Model to its inputs.
REQUESTS = {
    "reshaped": {"x": np.array([[1.5], [-2], [0.25]], np.float32)},
    "unbatched": {"x": np.arange(6, dtype=np.float32).reshape(2, 3)},
    "sentiment": TOKENS,
    "embedder": TOKENS,
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Triton, and Fewheads, with two models of the one and two of the other."""
    place = tmp_path_factory.mktemp("repositories")
    repository = write_repository(place / "repository")
    invoke(pack, repository, "--triton", "--repository", place / "bundles")
    write_sentiment_bundle(place / "bundles" / "sentiment-1")
    write_embedder_bundle(place / "bundles" / "embedder-1")
    written = ("--triton", "--repository", repository)
    invoke(export, place / "bundles" / "embedder-1", *written)
    invoke(export, place / "bundles" / "sentiment-1", *written, "--tier", "lean")
    backend = place / "backends" / "onnxruntime"
    backend.mkdir(parents=True)
    (place / "backends" / "python").symlink_to(TRITON / "backends" / "python")
    shutil.copy(str(__file__).replace("test_repositories", "onnxruntime_backend"), backend / "model.py")
    bundles = sorted((place / "bundles").iterdir())
    with (
        running_server(bundles, cache=place / "cache", target="onnxruntime") as ready,
        # Python's backend crashes on a busy machine if several models start side by side.
        serving_with_triton(place, place / "backends", REQUESTS, "--model-load-thread-count=1") as url,
        tritonclient.InferenceServerClient(url) as theirs,
        tritonclient.InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as ours,
    ):
        yield theirs, ours


@pytest.mark.parametrize("model", REQUESTS)
def test_both_compute_the_same(servers, model):
    theirs, ours = servers
    inputs = [triton_input(*pair) for pair in REQUESTS[model].items()]
    expected = theirs.infer(model, inputs)
    parameters = {"tier": "lean"} if model == "sentiment" else None
    outputs = [tritonclient.InferRequestedOutput(output.name) for output in expected.get_response().outputs]
    found = ours.infer(model, inputs, outputs=outputs, parameters=parameters)
    for output in expected.get_response().outputs:
        np.testing.assert_allclose(found.as_numpy(output.name), expected.as_numpy(output.name), rtol=1e-6)


@pytest.mark.parametrize("model", ["reshaped", "sentiment"])
def test_triton_finds_the_labels(servers, model):
    theirs, ours = servers
    inputs = [triton_input(*pair) for pair in REQUESTS[model].items()]
    classes = [tritonclient.InferRequestedOutput("logits", class_count=1)]
    parameters = {"tier": "lean"} if model == "sentiment" else None
    expected = theirs.infer(model, inputs, outputs=classes).as_numpy("logits")
    found = ours.infer(model, inputs, outputs=classes, parameters=parameters)
    np.testing.assert_array_equal(found.as_numpy("logits"), expected)
    assert expected.ravel()[0].split(b":")[2]


@pytest.mark.parametrize("model", REQUESTS)
def test_both_describe_a_model_alike(servers, model):
    of_triton, of_ours = (server.get_model_config(model).config for server in servers)
    if model in ("sentiment", "embedder"):  # of which clients of Fewheads may send texts, too
        assert {one.name for one in of_triton.input} < {one.name for one in of_ours.input}
        return
    assert of_triton.max_batch_size == of_ours.max_batch_size
    for theirs, ours in ((of_triton.input, of_ours.input), (of_triton.output, of_ours.output)):
        known = {one.name: (one.data_type, list(one.dims)) for one in ours}
        assert {one.name: (one.data_type, list(one.dims)) for one in theirs}.items() <= known.items()
