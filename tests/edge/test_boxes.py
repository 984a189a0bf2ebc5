"""Boxes around objects: a search of all pairs of query and class, places in pictures, and served detectors."""

import base64
import json

import msgspec
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from PIL import Image, ImageOps
from tritonclient.utils import InferenceServerException

from edge.bundles.boxes import Picture, extract
from edge.bundles.image import ImagePreprocessor
from edge.bundles.rules import check
from edge.errors import BundleError
from edge.launch import running_server
from tests.support.commands import mistake, shown
from tests.support.detector_model import BOXES, LABELS, NAME, QUERIES, STEP, outputs, searched, write_detector_bundle
from tests.support.http_requests import ask, tensor
from tests.support.image_model import encoded, picture
from tests.support.sample_requests import column, triton_input

PICTURES = [picture(32, 20, seed=6), picture(10, 40, seed=4)]  # whose sides are whole in a letterbox of 8 pixels
FILES = [encoded(PICTURES[0]), encoded(PICTURES[1], "JPEG", quality=95)]
REQUESTED = ("boxes", "scores", "classes", "labels")


def expected(**options):
    """Return the boxes of each of :data:`FILES` by a search."""
    of_rows = zip(*outputs(ImagePreprocessor(STEP)(column(*FILES))["pixels"]), PICTURES, strict=True)
    return [searched(logits, shares, one.size, **options) for logits, shares, one in of_rows]


def assert_found(answer, wanted):
    """Compare arrays by name with the boxes of a search for each row."""
    rows, most = len(wanted), max(map(len, wanted))
    assert {name: array.shape for name, array in answer.items()} == {
        **dict.fromkeys(REQUESTED, (rows, most)),
        "boxes": (rows, most, 4),
    }
    for row, found in enumerate(wanted):
        count = len(found)
        np.testing.assert_allclose(answer["scores"][row, :count], [one[0] for one in found], atol=1e-6)
        assert answer["classes"][row, :count].tolist() == [one[1] for one in found]
        assert answer["labels"][row, :count].tolist() == [LABELS[one[1]].encode() for one in found]
        corners = np.array([one[2] for one in found]).reshape(-1, 4)
        np.testing.assert_allclose(answer["boxes"][row, :count], corners, rtol=1e-5, atol=1e-3)
        assert (answer["classes"][row, count:] == -1).all()
        assert set(answer["labels"][row, count:]) <= {b""}
        assert not answer["scores"][row, count:].any()
        assert not answer["boxes"][row, count:].any()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("boxes")
    write_detector_bundle(directory / NAME)
    with running_server([directory / NAME], cache=directory / "cache", arguments=["--http-port=0"]) as ready:
        yield {"grpc": f"127.0.0.1:{ready.grpc_port}", "http": f"127.0.0.1:{ready.http_port}"}


def asked(server, transport, *files, requested=(), name="image", **parameters):
    module = {"grpc": triton, "http": triton_http}[transport]
    with module.InferenceServerClient(server[transport]) as client:
        sent = [triton_input(name, files[0] if name == "pixels" else column(*files), module)]
        wanted = [module.InferRequestedOutput(one) for one in requested]
        result = client.infer(NAME, sent, outputs=wanted or None, parameters=parameters or None)
        answer = result.get_response()
        names = [one["name"] for one in answer["outputs"]] if transport == "http" else [o.name for o in answer.outputs]
        return {one: result.as_numpy(one) for one in names}


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
@pytest.mark.parametrize(("threshold", "top_k"), [(0.5, 100), (0.2, 4), (0.0, 100), (1.0, 100)])
def test_boxes_are_those_of_a_search(activation, threshold, top_k):
    softmax = activation == "softmax"
    step = msgspec.structs.replace(BOXES, activation=activation, labels=("a", "b") if softmax else LABELS)
    draw = np.random.default_rng(3)
    logits = draw.normal(0, 2, (2, QUERIES, 3)).astype(np.float32)
    logits[1] -= 1  # so that the rows differ in their boxes
    logits[0, 0] = 0, -40, 0  # scores of exactly 0.5, with either activation, are not above 0.5
    shares = draw.random((2, QUERIES, 4), np.float32)
    sizes = [(640, 480), (33, 1000)]
    pictures = [Picture(size, (size[0] * 64 // max(size), size[1] * 64 // max(size)), (0, 0), 64) for size in sizes]
    got = extract(step, logits, shares, pictures, threshold, top_k)
    options = {"softmax": softmax, "threshold": threshold, "top_k": top_k}
    wanted = [searched(of_row, shares[row], sizes[row], **options) for row, of_row in enumerate(logits)]
    assert got["scores"].shape == (2, max(map(len, wanted)))
    for row, found in enumerate(wanted):
        np.testing.assert_allclose(got["scores"][row, : len(found)], [one[0] for one in found], atol=1e-6)
        assert [one for one in got["classes"][row] if one >= 0] == [one[1] for one in found]


def whites(values):
    """Return x1, y1, x2, y2 of what is brighter than half in grey values, [height, width]."""
    y, x = np.nonzero(values > 0.5)
    return [x.min(), y.min(), x.max() + 1, y.max() + 1]


@pytest.mark.parametrize("resize", ["crop", "stretch", "letterbox"])
@pytest.mark.parametrize("size", [(48, 24), (24, 48), (480, 240)])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_box_in_the_pixels_is_mapped_back_to_the_upright_picture(resize, size, orientation):
    unit = max(size) // 12
    values, places = np.zeros(size[::-1], np.uint8), [slice(unit, 4 * unit), slice(4 * unit, 7 * unit)]
    values[tuple(places if size[0] > size[1] else places[::-1])] = 255  # in the middle, which a crop keeps
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(values)
    data = encoded(image, "JPEG", exif=exif, quality=98)
    step = msgspec.structs.replace(STEP, size=24, resize=resize)
    pixels, (placed,) = ImagePreprocessor(step).placed(column(data))
    x1, y1, x2, y2 = (float(one) / 24 for one in whites(pixels["pixels"][0].mean(axis=0)))
    (got,) = placed.corners(np.array([[(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1]]))
    image.getexif()[0x0112] = orientation
    upright = ImageOps.exif_transpose(image)
    assert placed.size == upright.size
    np.testing.assert_allclose(got, whites(np.asarray(upright) / 255), atol=1e-9)


@pytest.mark.parametrize("size", [(1, 1), (4000, 1), (1, 3999), (17, 1000)])
def test_the_whole_of_an_extreme_picture_is_its_size_in_a_letterbox(size):
    pixels, (placed,) = ImagePreprocessor(STEP).placed(column(encoded(Image.new("RGB", size, (255, 255, 255)))))
    (height, width), side = np.argwhere(pixels["pixels"][0, 0] == 1).max(axis=0) + 1, STEP.size
    whole = np.array([[width / 2, height / 2, width, height]]) / side
    np.testing.assert_allclose(placed.corners(whole), [[0, 0, *size]], rtol=1e-12)


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_stock_clients_send_pictures_and_get_boxes(server, transport):
    wanted = expected()
    assert len({len(found) for found in wanted}) == 2  # a row is filled
    assert {number for found in wanted for _, number, _ in found} == {0, 1, 2}
    assert_found(asked(server, transport, *FILES), wanted)
    assert_found(asked(server, transport, *FILES, threshold=0.9, top_k=2), expected(threshold=0.9, top_k=2))
    none = asked(server, transport, *FILES, threshold=1.0)
    assert {name: array.shape for name, array in none.items()} == {
        **dict.fromkeys(REQUESTED, (2, 0)),
        "boxes": (2, 0, 4),
    }
    some = asked(server, transport, FILES[0], requested=["scores", "logits"])
    assert {name: array.shape for name, array in some.items()} == {
        "scores": (1, len(wanted[0])),
        "logits": (1, QUERIES, len(LABELS)),
    }
    pixels = ImagePreprocessor(STEP)(column(FILES[0]))["pixels"]
    raw = asked(server, transport, pixels, name="pixels")
    assert set(raw) == {"logits", "pred_boxes"}  # the size of its picture is not known
    np.testing.assert_allclose(raw["logits"], outputs(pixels)[0], atol=1e-4)


@pytest.mark.parametrize("threshold", [0.9, 1])
def test_json_has_boxes_row_by_row(server, threshold):
    sent = tensor("image", "BYTES", [2, 1], [{"b64": base64.b64encode(file).decode()} for file in FILES])
    answer = ask(server["http"], f"/v2/models/{NAME}/infer", {"inputs": [sent], "parameters": {"threshold": threshold}})
    found = {one["name"]: np.reshape(one["data"], one["shape"]) for one in answer.json["outputs"]}
    found["labels"] = np.array([[one.encode() for one in row] for row in found["labels"]], np.object_)
    assert_found(found, expected(threshold=threshold))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 1.5}, "parameter 'threshold': got 1.5, expected 0 to 1"),
        ({"threshold": float("nan")}, "parameter 'threshold': got nan, expected 0 to 1"),
        ({"top_k": 0}, "parameter 'top_k' of 'finder': got 0, expected 1 to 1000"),
        ({"temperature": 1.0, "top_k": 2}, "parameter 'temperature' of 'finder'.* generates no text"),
        ({"threshold": 0.5, "requested": ["logits"]}, "parameter 'threshold' of 'finder'.*the request gets no boxes"),
        ({"top_k": 5, "requested": ["logits"]}, "parameter 'top_k' of 'finder'.*the request gets no boxes"),
        ({"name": "pixels", "requested": ["scores"]}, "output 'scores' of 'finder': got pixels, expected 'image'"),
    ],
)
def test_requests_that_boxes_refuse(server, options, message):
    pixels = ImagePreprocessor(STEP)(column(FILES[0]))["pixels"]
    with pytest.raises(InferenceServerException, match=message):
        asked(server, "grpc", pixels if options.get("name") else FILES[0], **options)


def test_boxes_are_not_made_of_nan_nor_ranked_again(server):
    black = encoded(Image.new("RGB", (9, 9)))
    with pytest.raises(InferenceServerException, match=r"output 'boxes' .*got a NaN or an infinity in 'logits'"):
        asked(server, "grpc", FILES[0], black)
    assert np.isnan(asked(server, "grpc", black, requested=["logits"])["logits"]).all()
    with triton.InferenceServerClient(server["grpc"]) as client:
        wanted = [triton.InferRequestedOutput("boxes"), triton.InferRequestedOutput("logits", class_count=2)]
        result = client.infer(NAME, [triton_input("image", column(FILES[0]))], outputs=wanted)
        assert result.as_numpy("boxes").shape == (1, len(expected()[0]), 4)
        assert result.as_numpy("logits").shape == (1, 2)
        wanted = [triton.InferRequestedOutput("scores", class_count=1)]
        with pytest.raises(InferenceServerException, match=r"classes of output 'scores'.*expected none: boxes are"):
            client.infer(NAME, [triton_input("image", column(FILES[0]))], outputs=wanted)


def test_infer_shows_a_line_for_each_box(server, tmp_path):
    paths = [tmp_path / "a.png", tmp_path / "b.jpg"]
    for path, file in zip(paths, FILES, strict=True):
        path.write_bytes(file)
    command = ("infer", "--url", server["grpc"], NAME, *paths)
    wanted = expected(threshold=0.9, top_k=2)
    table = shown(*command, "--threshold", 0.9, "--top", 2).splitlines()
    lines = [line.replace("│", " ").split() for line in table if any(label in line for label in LABELS)]
    assert [line[1:] for line in lines] == [
        [LABELS[number], str(number), f"{np.float32(score):.4g}", *(str(round(value)) for value in corners)]
        for found in wanted
        for score, number, corners in found
    ]
    answer = json.loads(shown(*command, "--threshold", 0.9, "--top-k", 2, "--json"))["outputs"]
    assert {name: np.array(values).shape[:2] for name, values in answer.items()} == dict.fromkeys(REQUESTED, (2, 2))
    none = shown(*command, "--threshold", 1)
    assert "a.png" in none
    assert "b.jpg" in none
    assert not any(label in none for label in LABELS)
    assert "--threshold" in mistake(*command, "--threshold", "nan", code=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": "zz"}, r"postprocess logits: got 'zz', expected an FP32 output of shape \[-1, queries, classes\]"),
        ({"shares": "logits"}, r"postprocess shares: got 'logits', expected an FP32 output \[-1, 6, 4\]"),
        ({"labels": ("a", "b")}, "postprocess labels: got 2 for 3 classes, expected one for each class with"),
        ({"label": None}, "postprocess labels: got 3 for 3 classes"),
        ({"activation": "softmax"}, "postprocess labels: got 3 for 2 classes"),
        ({"boxes": "pred_boxes"}, "postprocess output: got 'pred_boxes', expected a name that no tensor"),
        ({"boxes": "scores"}, "postprocess output: got 'scores', expected each name once"),
    ],
)
def test_manifests_of_boxes_that_break_a_rule(change, message, tmp_path):
    good = write_detector_bundle(tmp_path / NAME).manifest
    check(good, "m")
    step = msgspec.structs.replace(BOXES, **change)
    with pytest.raises(BundleError, match=message):
        check(msgspec.structs.replace(good, postprocess=step), "m")
    with pytest.raises(BundleError, match=r"preprocess: got another step, expected an image before boxes"):
        check(msgspec.structs.replace(good, preprocess=None), "m")
