"""Models of images: stock clients over gRPC and HTTP, ranked labels, the command line, and the event loop."""

import asyncio
import base64
import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from PIL import Image
from tritonclient.utils import InferenceServerException

from edge.bundles.image import ImagePreprocessor
from edge.bundles.preprocess import preprocessor
from edge.cli.answers import labels_of
from edge.cli.doctor import bundle_checks
from edge.errors import BundleError, DeadlineExceeded, InvalidRequest, Overloaded
from edge.launch import running_server
from edge.pb import inference_pb2 as pb
from tests.support.commands import mistake, shown
from tests.support.http_requests import ask, tensor
from tests.support.image_model import LABELS, NAME, bright, encoded, logits, write_image_bundle
from tests.support.in_process import running_service
from tests.support.models import ORACLE, write_oracle_bundle
from tests.support.sample_requests import column, good, raw_request, triton_input

FILES = [encoded(bright(250, 5)), encoded(bright(10, 200, 30, 20), "JPEG")]
#: Takes a while to decode, and to encode, so it is made once.
LARGE = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (3000, 3000), np.uint8)), compress_level=1)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("images")
    write_image_bundle(directory / NAME)
    write_oracle_bundle(directory / ORACLE)
    bundles = [directory / NAME, directory / ORACLE]
    with running_server(bundles, cache=directory / "cache", arguments=["--http-port=0"]) as ready:
        yield {"grpc": f"127.0.0.1:{ready.grpc_port}", "http": f"127.0.0.1:{ready.http_port}"}


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_stock_clients_send_files_and_get_logits_labels_and_ranked_probabilities(server, transport):
    module = {"grpc": triton, "http": triton_http}[transport]
    with module.InferenceServerClient(server[transport]) as client:
        images = [triton_input("image", column(*FILES), module)]
        result = client.infer(NAME, images)
        np.testing.assert_allclose(result.as_numpy("logits"), logits(FILES), atol=1e-6)
        assert result.as_numpy("label").tolist() == [[b"upper"], [b"lower"]]
        assert result.as_numpy("probabilities") is None  # only clients that ask for them get them
        powers = np.exp(logits(FILES))
        wanted = [module.InferRequestedOutput("probabilities")]
        probabilities = client.infer(NAME, images, outputs=wanted).as_numpy("probabilities")
        np.testing.assert_allclose(probabilities, powers / powers.sum(axis=1, keepdims=True), rtol=1e-5)
        for count, columns in ((1, 1), (9, 2)):
            wanted = [module.InferRequestedOutput("probabilities", class_count=count)]
            ranked = client.infer(NAME, images, outputs=wanted).as_numpy("probabilities")
            expected = [
                [f"{row[index]:f}:{index}:{LABELS[index]}".encode() for index in np.argsort(-row)[:columns]]
                for row in probabilities
            ]
            assert ranked.tolist() == expected
        with pytest.raises(InferenceServerException, match="'classification' of output 'label': got 'BYTES'"):
            client.infer(NAME, images, outputs=[module.InferRequestedOutput("label", class_count=1)])
        with pytest.raises(InferenceServerException, match=r"^.*image in input 'image' row 2: got GIF, expected JPEG"):
            client.infer(NAME, [triton_input("image", column(FILES[0], b"GIF89a"), module)])


def test_outputs_without_labels_are_ranked_by_index(server):
    with triton.InferenceServerClient(server["grpc"]) as client:
        wanted = [triton.InferRequestedOutput("value", class_count=3)]
        result = client.infer(ORACLE, [triton_input("expression", column("1 + 2", "5"))], outputs=wanted)
        assert result.as_numpy("value").tolist() == [[b"3.000000:0"], [b"5.000000:0"]]
        assert "classification" in client.get_server_metadata().extensions


def test_json_takes_base64(server):
    def answer(*data):
        body = {"inputs": [tensor("image", "BYTES", [len(data), 1], data)]}
        return ask(server["http"], f"/v2/models/{NAME}/infer", body).json

    found = answer(*({"b64": base64.b64encode(file).decode()} for file in FILES))
    assert {one["name"]: one["data"] for one in found["outputs"]}["label"] == ["upper", "lower"]
    for data, message in (
        ({"b64": "a?="}, "an element of input 'image': got .*, expected base64"),
        ({"b64": 1}, r"got an object with \['b64'\], expected a string under 'b64' alone"),
        ({"base64": ""}, r"got an object with \['base64'\], expected a string under 'b64' alone"),
    ):
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(answer(data)["error"])


def test_infer_takes_files_and_shows_the_likeliest_labels(server, tmp_path):
    paths = [tmp_path / "a.png", tmp_path / "b.jpg"]
    for path, file in zip(paths, FILES, strict=True):
        path.write_bytes(file)
    url = ("--url", server["grpc"])
    answer = json.loads(shown("infer", *url, NAME, *paths, "--top", 1, "--json"))
    ((first,), (second,)) = answer["outputs"]["probabilities"]
    assert (first["label"], second["label"]) == LABELS
    assert 0.5 < second["probability"] < first["probability"] < 1
    lines = [line.split() for line in shown("infer", *url, NAME, *paths, "--top", 2).splitlines()]
    table = [line for line in lines if any(word in LABELS for word in line)]
    assert [word for line in table for word in line if word in LABELS] == ["upper", "lower", "lower", "upper"]
    assert "upper" in shown("infer", *url, NAME, paths[0])
    command = [sys.executable, "-m", "edge", "infer", *url, NAME, "-", "--json"]
    piped = subprocess.run(command, input=FILES[1], capture_output=True, check=True)
    assert json.loads(piped.stdout)["outputs"]["label"] == [["lower"]]
    assert "expected a file. Give paths" in mistake("infer", *url, NAME, paths[0], tmp_path / "c.png", code=2)
    assert "No such file or directory: 'c.PNG'" in mistake("infer", *url, NAME, "c.PNG", code=2)
    assert "got bytes that begin with b'picture'" in mistake("infer", *url, NAME, "picture", code=7)
    assert mistake("infer", *url, NAME).endswith(f"expected TEXT or --input. Try: fewheads infer {NAME} picture.png")
    assert "--top: got calculator-oracle with" in mistake("infer", *url, ORACLE, "1", "--top", 1, code=2)


def test_golden_images_must_give_the_golden_pixels_but_for_two_levels(tmp_path):
    level = 1 / 255 / 0.5
    assert preprocessor(write_image_bundle(tmp_path / "near", 1.9 * level))
    with pytest.raises(
        BundleError, match=r"golden raw 'image': got other values, expected within 0\.016 of the golden"
    ):
        preprocessor(write_image_bundle(tmp_path / "far", 2.1 * level))


def test_doctor_and_info_name_the_step_and_what_it_needs(tmp_path, monkeypatch):
    path = write_image_bundle(tmp_path / NAME).path
    text = " ".join(shown("info", path).split())
    assert (
        "step image: JPEG or PNG of at most 33554432 bytes and 20000000 pixels, grey, resized (bilinear): the" in text
    )
    good = next(bundle_checks(path, "onnxruntime", tmp_path / "cache"))
    assert (good.name, good.status) == (f"{NAME} preprocess", "ok")
    monkeypatch.setitem(sys.modules, "PIL", None)
    (check,) = bundle_checks(path, "onnxruntime", tmp_path / "cache")
    assert (check.status, check.found[:7], check.advice) == ("failed", "pillow:", "Install the extra 'images'.")


def images(*files):
    return raw_request(NAME, image=column(*files))


def write(repository):
    write_image_bundle(repository / NAME)
    write_oracle_bundle(repository / ORACLE)


async def test_event_loop_goes_on_while_an_image_is_decoded(tmp_path):
    async with running_service(tmp_path, write) as it:
        slow = asyncio.create_task(it.infer(images(LARGE)))
        answered = 0
        while not slow.done():
            await it.infer(good())
            await asyncio.sleep(0)  # as between two requests of a connection
            answered += 1
        assert answered > 5
        assert (await slow).outputs[0].name == "logits"
        stages = it.counted(NAME).stages
        assert stages["compute_input"].total > stages["compute_infer"].total
        assert await it.at_rest(NAME)


async def test_bad_image_fails_alone(tmp_path):
    async with running_service(tmp_path, write) as it:
        requests = [images(file) for file in (FILES[0], b"GIF89a", FILES[1])]
        first, bad, last = await asyncio.gather(*map(it.infer, requests), return_exceptions=True)
        assert isinstance(bad, InvalidRequest)
        assert isinstance(first, pb.ModelInferResponse)
        assert isinstance(last, pb.ModelInferResponse)
        assert (it.counted(NAME).fail, it.counted(NAME).inference_count) == (1, 2)
        assert await it.at_rest(NAME)


async def test_image_ends_with_its_request(tmp_path):
    async with running_service(tmp_path, write) as it:
        cancelled = asyncio.create_task(it.infer(images(LARGE)))
        late = asyncio.create_task(it.infer(images(LARGE), time.monotonic() + 0.001))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(DeadlineExceeded):
            await late
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await it.at_rest(NAME)  # the model can be unloaded
        assert it.counted(NAME).inference_count == 0


async def test_images_that_wait_are_limited(tmp_path):
    async with running_service(tmp_path, write) as it:
        it.scheduler.queue.max_jobs = 2
        answers = await asyncio.gather(*(it.infer(images(LARGE)) for _ in range(4)), return_exceptions=True)
        assert [isinstance(answer, Overloaded) for answer in answers] == [False, False, True, True]
        assert "2 waiting requests" in str(answers[2])
        it.scheduler.queue.max_jobs, it.scheduler.queue.max_bytes = 9, 3 * len(LARGE)
        answers = await asyncio.gather(*(it.infer(images(LARGE)) for _ in range(4)), return_exceptions=True)
        assert [isinstance(answer, Overloaded) for answer in answers] == [False, False, True, True]
        assert f"expected at most {3 * len(LARGE)}" in str(answers[2])
        assert isinstance(await it.infer(images(FILES[0])), pb.ModelInferResponse)


def test_labels_of_rows_and_of_a_model_without_a_batch():
    ranked = np.array([b"0.75:1:a:b", b"0.25:0:c"], np.object_)
    row = [{"label": "a:b", "probability": 0.75}, {"label": "c", "probability": 0.25}]
    assert labels_of(ranked) == [row]
    assert labels_of(np.stack([ranked, ranked])) == [row, row]


async def test_images_of_a_client_that_left_are_not_decoded(tmp_path, monkeypatch):
    begun, cancelled, read = threading.Event(), threading.Event(), ImagePreprocessor.read_placed
    rows = []

    def slowly(self, data, subject):
        rows.append(subject)
        begun.set()
        assert cancelled.wait(10)
        return read(self, data, subject)

    async with running_service(tmp_path, write) as it:
        monkeypatch.setattr(ImagePreprocessor, "read_placed", slowly)
        gone = asyncio.create_task(it.infer(images(*FILES, *FILES)))
        assert await asyncio.to_thread(begun.wait, 10)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        cancelled.set()
        assert await it.at_rest(NAME)
        await it.infer(images(FILES[0]))
        assert rows == ["image in input 'image' row 1", "image in input 'image'"]
