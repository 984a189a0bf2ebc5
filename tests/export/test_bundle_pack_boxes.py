"""Bundles of packed detectors: random small ones of transformers, names of outputs, and files that are none."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from edge.bundles.bundle import Bundle
from edge.bundles.image import ImagePreprocessor
from edge.errors import FewheadsError, UsageError
from edge.launch import running_server
from edge.runtimes.tensorrt.build import compile_onnx
from export.bundle.pack.steps import unused
from export.cli.export import export
from export.importing.image_processor import read_image_processor
from tests.support.commands import shown
from tests.support.detector_model import LABELS, QUERIES, SIZE, graph
from tests.support.image_model import encoded, picture
from tests.support.imported_directories import write_traced
from tests.support.marks import with_rtx, with_transformers
from tests.support.models import serialized
from tests.support.onnx_graphs import packed, write
from tests.support.sample_requests import column
from tests.support.stock_client import served_bundles
from tests.support.task_data import invoke

SIDE = 64
PROCESSOR = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_normalize": False}
LETTERBOX = {"size": {"max_height": SIZE, "max_width": SIZE}, "do_pad": True}


def rt_detr(transformers):
    stages = {"out_features": ["stage2", "stage3", "stage4"], "hidden_sizes": [8] * 4, "depths": [1] * 4}
    backbone = transformers.RTDetrResNetConfig(embedding_size=8, layer_type="basic", **stages)
    sizes = dict.fromkeys(("encoder_hidden_dim", "d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 16)
    sizes |= dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    channels = {"encoder_in_channels": [8] * 3, "decoder_in_channels": [16] * 3}
    config = transformers.RTDetrConfig(
        backbone_config=backbone, num_queries=12, num_labels=3, num_denoising=0, **sizes, **channels
    )
    model = transformers.RTDetrForObjectDetection(config)
    torch.nn.init.normal_(model.model.decoder.class_embed[-1].weight, std=0.7)
    torch.nn.init.normal_(model.model.decoder.bbox_embed[-1].layers[-1].weight, std=0.7)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1  # or the features of small random weights would be nearly 0
    with torch.no_grad():
        model.train()(torch.rand(2, 3, SIDE, SIDE))
    size = {"height": SIDE, "width": SIDE}
    return model, transformers.RTDetrImageProcessorPil(size=size)


def yolos(transformers):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.YolosConfig(
        image_size=[SIDE, SIDE], patch_size=16, num_detection_tokens=30, num_labels=3, **sizes
    )
    model = transformers.YolosForObjectDetection(config)
    model.set_attn_implementation("eager")
    torch.nn.init.normal_(model.vit.embeddings.detection_tokens)  # zeros are 30 equal queries
    for head in (model.class_labels_classifier, model.bbox_predictor):
        for layer in head.layers:
            torch.nn.init.normal_(layer.weight, std=0.4)
    letterbox = {"max_height": SIDE, "max_width": SIDE}
    processor = transformers.YolosImageProcessorPil(pad_size={"height": SIDE, "width": SIDE})
    processor.size = letterbox  # its constructor takes other sizes alone
    return model, processor


DETECTORS = {"rt-detr": rt_detr, "yolos": yolos}


@pytest.fixture(scope="module", params=DETECTORS)
def detector(request, tmp_path_factory):
    """A random detector of transformers, its image processor, and the bundle that is packed of its export."""
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("detector")
    torch.manual_seed(0)
    model, processor = DETECTORS[request.param](transformers)
    processor.save_pretrained(directory)
    axes = {name: {0: "batch"} for name in ("pixel_values", "logits", "pred_boxes")}
    write_traced(model, {"pixel_values": torch.rand(2, 3, SIDE, SIDE)}, axes, directory / "model.onnx", 18)
    write(directory / "labels.txt", "\n".join(LABELS).encode())
    options = ("--image", directory / "preprocessor_config.json", "--labels", directory / "labels.txt")
    written = packed(directory / "model.onnx", "--detect", request.param, "--threshold", 0.4, *options)
    assert written["only_onnxruntime"] == ""
    return model, processor, Bundle.open(written["bundle"])


@with_transformers
def test_a_client_gets_the_boxes_of_transformers(detector, tmp_path):
    model, processor, bundle = detector
    images = [picture(96, 60, seed=1), picture(32, 64, seed=2)]  # whose sides are whole in a letterbox of 64 pixels
    files = [encoded(image) for image in images]
    with served_bundles([bundle.path], tmp_path / "cache") as ask:
        answer = ask("own", {"image": column(*files)})
    pixels = processor(images, return_tensors="pt")["pixel_values"]
    made = ImagePreprocessor(bundle.manifest.preprocess)(column(*files))["pixel_values"]
    np.testing.assert_allclose(made, pixels.numpy(), atol=1e-5)
    with torch.no_grad():
        outputs = model(pixel_values=pixels)
    # Boxes are shares of all that the model reads: of a letterbox, a square of the picture's longer side.
    is_letterbox = bundle.manifest.preprocess.resize == "letterbox"
    sizes = torch.tensor([[max(one.size)] * 2 if is_letterbox else one.size[::-1] for one in images])
    wanted = processor.post_process_object_detection(outputs, threshold=0.4, target_sizes=sizes)
    found = np.concatenate([one["labels"].numpy() for one in wanted])
    assert np.bincount(found, minlength=3).min() >= 2  # several of each class
    for row, one in enumerate(wanted):
        order, count = torch.argsort(one["scores"], descending=True), len(one["scores"])
        np.testing.assert_allclose(answer["scores"][row, :count], one["scores"][order], atol=1e-4)
        np.testing.assert_allclose(answer["boxes"][row, :count], one["boxes"][order], atol=1e-2)
        assert answer["classes"][row, :count].tolist() == one["labels"][order].tolist()
        assert (answer["classes"][row, count:] == -1).all()
    assert answer["labels"][0, 0].decode() == LABELS[answer["classes"][0, 0]]


@with_transformers
@pytest.mark.parametrize("size", [(98, 60), (49, 103), (127, 90)])
def test_a_letterbox_rounds_as_transformers(tmp_path, size):
    _, processor = yolos(pytest.importorskip("transformers"))
    processor.save_pretrained(tmp_path)
    step = read_image_processor(tmp_path / "preprocessor_config.json", SIDE, 3)
    pixels = ImagePreprocessor(step).read(encoded(picture(*size)), "image")
    wanted = processor(picture(*size), return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(pixels, wanted, atol=1e-5)


@with_transformers
@with_rtx
def test_tensorrt_compiles_the_detector(detector):
    bundle = detector[2]
    data, profile = bundle.read("model.onnx"), bundle.manifest.profile
    assert compile_onnx(data, profile, flavor="tensorrt_rtx", compute_capability="SM86", subject="detector").data


@pytest.fixture
def image(tmp_path):
    return ["--image", write(tmp_path / "processor.json", json.dumps(PROCESSOR | LETTERBOX).encode())]


def test_the_outputs_have_other_names_where_the_graph_takes_them(tmp_path, image):
    path = write(tmp_path / "model.onnx", serialized(graph("labels", "dets")))  # as RF-DETR's own export
    labels = write(tmp_path / "labels.txt", "\n".join(LABELS).encode())
    options = ("--detect", "rf-detr", *image, "--labels", labels, "--threshold", 0, "--top-k", 3)
    bundle = Bundle.open(packed(path, *options)["bundle"])
    step = bundle.manifest.postprocess
    assert (step.reads, step.threshold, step.top_k) == (("labels", "dets"), 0.0, 3)
    street = write(tmp_path / "street.png", encoded(picture(32, 20)))
    with running_server([bundle.path], cache=tmp_path / "cache") as ready:
        command = ("infer", "--url", f"127.0.0.1:{ready.grpc_port}", "own", street)
        answer = json.loads(shown(*command, "--json"))["outputs"]
        table = shown(*command)
    assert set(answer) == {"detected_boxes", "detected_scores", "detected_classes", "detected_labels"}
    assert [table.count(label) for label in LABELS] == [answer["detected_labels"][0].count(one) for one in LABELS]


def test_a_graph_with_all_names_that_a_step_could_take():
    choices = [["boxes", "scores"], ["detected_boxes", "detected_scores"]]
    taken = {"logits", "boxes", "detected_scores"}
    message = "one: got boxes, detected_scores, expected a graph without all of these names: boxes, scores or detected_"
    with pytest.raises(UsageError, match=message):
        unused(choices, taken, "one")


def test_a_detector_without_labels(tmp_path, image):
    path = write(tmp_path / "model.onnx", serialized(graph()))
    step = Bundle.open(packed(path, "--detect", "detr", *image)["bundle"]).manifest.postprocess
    assert (step.activation, step.label, len(step.results)) == ("softmax", None, 3)
    assert (step.threshold, step.top_k) == (0.5, QUERIES)
    place = tmp_path / "models" / "own-1"
    assert "pipeline_tag: object-detection" in (place / "README.md").read_text()
    assert f"the longer side to {SIZE}, zeros to the right or below" in " ".join(shown("info", place).split())
    written = json.loads(invoke(export, place, "--triton", "--repository", tmp_path / "triton", "--json"))
    assert "clients get logits, pred_boxes, without boxes, scores, classes" in json.dumps(written)


def test_files_and_options_that_make_no_detector(tmp_path, image):
    labels = ["--labels", write(tmp_path / "labels.txt", b"cat\ndog")]
    none = ["--labels", write(tmp_path / "none.txt", b"")]
    stock = {"size": {"shortest_edge": 800, "longest_edge": 1333}, "do_pad": True}
    yolos_image = ["--image", write(tmp_path / "stock.json", json.dumps(PROCESSOR | stock).encode())]
    older = {"size": SIZE, "max_size": 1333}  # the shorter side, and the most of the longer one
    older_image = ["--image", write(tmp_path / "older.json", json.dumps(PROCESSOR | older).encode())]
    equal = {"size": {"shortest_edge": SIZE, "longest_edge": SIZE}, "do_pad": True}
    equal_image = ["--image", write(tmp_path / "equal.json", json.dumps(PROCESSOR | equal).encode())]
    no_room = PROCESSOR | LETTERBOX | {"pad_size": {"height": 9, "width": 9}}
    padded = ["--image", write(tmp_path / "padded.json", json.dumps(no_room).encode())]
    given = r"got logits FP32 \[-1, 6, 3\], zz FP32 \[-1, 6, 4\]"
    shares = "expected centre, width and height as shares of the picture's sides. Export the model without"
    for changes, options, message in (
        ({}, ["--detect", "yolos"], "--detect: got 'yolos', expected --image with it"),
        ({}, [*image, "--threshold", 0], "--threshold: got 0.0, expected --detect with it"),
        ({}, [*image, "--top-k", 5], "--top-k: got 5, expected --detect with it"),
        ({"boxes": "zz"}, [*image, "--detect", "yolos"], f"--detect for .*{given}, expected the FP32 outputs 'logits'"),
        ({"scale": 640}, [*image, "--detect", "yolos"], f"output 'pred_boxes' of .*: got values up to .*, {shares}"),
        ({"function": "Sigmoid"}, [*image, "--detect", "yolos"], "output 'logits' of .*from 0 to 1 alone, expected lo"),
        ({}, [*image, *labels, "--detect", "rt-detr"], "labels.txt: got 2 lines, expected 3, as many as 'logits' has"),
        ({}, [*image, *none, "--detect", "rt-detr"], "none.txt line 1: got '', expected a label"),
        ({}, [*yolos_image, "--detect", "yolos"], 'field size: got .*1333.*"max_width": 8} with "do_pad": true'),
        ({}, [*older_image, "--detect", "detr"], 'field size: got .*1333.*"max_width": 8} with "do_pad": true'),
        ({}, [*equal_image, "--detect", "yolos"], 'field size: got .*"longest_edge":8.*expected 8 x 8 pixels'),
        ({}, [*padded, "--detect", "yolos"], "field pad_size: got .*9.*, expected 8 x 8 pixels in the end"),
    ):
        path = write(tmp_path / "model.onnx", serialized(graph(**changes)))
        with pytest.raises(FewheadsError, match=message):
            packed(path, *options)
        assert not (tmp_path / "models").exists()


def test_an_image_processor_without_normalisation_keeps_the_colours(tmp_path):
    path = write(tmp_path / "processor.json", json.dumps(PROCESSOR | {"size": SIZE}).encode())
    step = read_image_processor(path, SIZE, 3)
    white = encoded(Image.new("RGB", (9, 5), (255, 51, 0)))
    assert ImagePreprocessor(step).read(white, "image")[:, 0, 0].tolist() == [1.0, np.float32(0.2), 0.0]
