"""Bundles of packed image models: from an image processor and labels to answers for pictures, and known networks."""

import json

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

from edge.bundles.bundle import Bundle
from edge.bundles.image import ImagePreprocessor
from edge.bundles.preprocess import preprocessor
from edge.datatypes import TensorSpec
from edge.errors import FewheadsError
from edge.launch import running_server
from edge.runtimes.build import load_runner
from export.bundle.pack.golden import largest_rms
from export.bundle.pack.steps import label_step
from export.cli.pack import pack
from export.importing.image_processor import read_image_processor
from tests.support.commands import shown
from tests.support.image_model import encoded
from tests.support.marks import with_transformers
from tests.support.onnx_graphs import FLOAT, constant, model_of, node, packed, value, write
from tests.support.task_data import invoke

SIZE, LABELS = 8, ("red", "green", "blue")
PROCESSOR = {"size": {"shortest_edge": 12}, "do_center_crop": True, "crop_size": SIZE}
PROCESSOR |= {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "resample": 3}


def colours(rows="batch", outputs=1, size=(SIZE, SIZE)):
    """A classifier whose logits are the mean brightness of each colour."""
    nodes = [node("ReduceMean", ["image"], ["means"], axes=[2, 3], keepdims=0)]
    nodes += [node("MatMul", ["means", "weight"], [f"logits{number}"]) for number in range(outputs)]
    ends = [value(f"logits{number}", (rows, 3), FLOAT) for number in range(outputs)]
    weight = constant("weight", 10 * np.eye(3, dtype=np.float32))
    return model_of(nodes, [value("image", (rows, 3, *size))], ends, [weight])


@pytest.fixture
def options(tmp_path):
    write(tmp_path / "processor.json", json.dumps(PROCESSOR).encode())
    write(tmp_path / "labels.txt", "\n".join(LABELS).encode() + b"\n")
    return ["--image", tmp_path / "processor.json", "--labels", tmp_path / "labels.txt"]


def pictures(directory, count=4):
    directory.mkdir()
    for number in range(count):
        noise = np.random.default_rng(number).integers(0, 256, (20, 30, 3), np.uint8)
        kind = ("JPEG", "PNG")[number % 2]
        write(directory / f"{number}.{kind.lower()}", encoded(Image.fromarray(noise), kind))
    return directory


def test_a_picture_gets_its_label(tmp_path, options):
    bundle = Bundle.open(packed(write(tmp_path / "model.onnx", colours()), *options)["bundle"])
    blue = write(tmp_path / "blue.png", encoded(Image.new("RGB", (30, 20), (20, 10, 250))))
    with running_server([bundle.path], cache=tmp_path / "cache") as ready:
        command = ("infer", "--url", f"127.0.0.1:{ready.grpc_port}", "own", blue, "--top", 3, "--json")
        (ranked,) = json.loads(shown(*command))["outputs"]["probabilities"]
    assert [one["label"] for one in ranked] == ["blue", "red", "green"]
    assert ranked[0]["probability"] > 0.99


def test_golden_and_calibration_images_are_read_from_directories(tmp_path, options):
    golden, others = pictures(tmp_path / "golden"), pictures(tmp_path / "others", 9)
    more = ("--int8", "--inputs", golden, "--calibration", others)
    written = packed(write(tmp_path / "model.onnx", colours()), *options, *more)
    assert (written["golden"], written["golden_rows"]) == ("golden", 4)
    bundle = Bundle.open(written["bundle"])
    files = [path.read_bytes() for path in sorted(golden.iterdir())]
    assert bundle.golden.raw["image_file"].ravel().tolist() == files  # the graph's own input is called "image"
    step = preprocessor(bundle)
    assert step.graph_inputs == ("image",)
    for tier in bundle.manifest.tiers:
        load_runner(bundle, "onnxruntime", tmp_path / "cache", tier=tier.name).runner.close()


@with_transformers
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("ConvNextImageProcessorPil", {"size": {"shortest_edge": 64}, "crop_pct": 0.8}),
        ("ConvNextImageProcessorPil", {"size": {"shortest_edge": 384}, "crop_pct": 0.875}),
        ("BitImageProcessorPil", {"size": {"shortest_edge": 80}, "crop_size": {"height": 64, "width": 64}}),
    ],
)
def test_image_processors_of_convolutional_networks_are_those_of_transformers(tmp_path, kind, fields):
    import transformers

    processor = getattr(transformers, kind)(**fields)
    processor.save_pretrained(tmp_path)
    size = fields.get("crop_size", {}).get("height") or fields["size"]["shortest_edge"]
    step = read_image_processor(tmp_path / "preprocessor_config.json", size, 3)
    noise = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    image = Image.fromarray(noise).resize((500, 400), Image.Resampling.BICUBIC)
    wanted = processor(image, return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(ImagePreprocessor(step).read(encoded(image), "image"), wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("data", "labels"),
    [
        (b"\xef\xbb\xbfred\r\ngreen\r\nblue\r\n", LABELS),  # as Excel and Notepad write it
        ("r\u2028d\ngr\u0085n\nblue".encode(), ("r\u2028d", "gr\u0085n", "blue")),
        (b"crane\nheron\ncrane\n", ("crane", "heron", "crane")),
        (b"x" * 4096 + b"\ny\nz", ("x" * 4096, "y", "z")),
    ],
    ids=["excel", "separators", "repeated", "longest"],
)
def test_labels_are_the_lines_of_a_file(tmp_path, data, labels):
    output = TensorSpec("logits", "FP32", (-1, 3))
    assert label_step(write(tmp_path / "labels.txt", data), [output], tmp_path / "model.onnx").labels == labels


def test_options_for_images_and_labels_that_do_not_fit(tmp_path, options):
    image, labels = options[:2], options[2:]
    np.savez(tmp_path / "in.npz", image=np.zeros((2, 3, SIZE, SIZE), np.float32))
    short = write(tmp_path / "short.txt", b"red\nblue")
    latin = write(tmp_path / "latin.txt", b"gr\xfcn\nrot")
    gap = write(tmp_path / "gap.txt", b"red\r\n\r\nblue\r\n")
    ends = write(tmp_path / "ends.txt", b"red\ngreen\nblue\n\n")
    long = write(tmp_path / "long.txt", b"red\n" + b"x" * 4097 + b"\nblue")
    single, many = write(tmp_path / "single.txt", b"red\n"), write(tmp_path / "many.txt", b"x\n" * 4097)
    broken = write(tmp_path / "broken.json", b"{}")
    two = model_of(
        [node("Add", ["x", "z"], ["y"])],
        [value("x", ("batch", 3)), value("z", ("batch", 3))],
        [value("y", ("batch", 3))],
    )
    a_label = "expected a label of 1 to 4096 characters, not only spaces. Write the label of each column in a line"
    one_input = (
        r"expected one FP32 input \[-1, 1 or 3, size, size\].* as the only dynamic dimension, or leave --image out"
    )
    for data, given, message in (
        (two, image, rf"--image for .*: got x FP32 \[-1, 3\], z FP32 \[-1, 3\], {one_input}"),
        (colours(rows=1), image, rf"got image FP32 \[1, 3, 8, 8\], {one_input}"),
        (colours(size=("height", "width")), image, rf"got image FP32 \[-1, 3, -1, -1\], {one_input}"),
        (colours(size=(9, 9)), image, r'processor.json field size: got \{"shortest_edge":12\}, expected 9 x 9 pixels'),
        (colours(), ["--image", broken], r"broken.json: got .*image_mean.*, expected the JSON of a Hugging Face model"),
        (colours(), ["--labels", short], r"short.txt: got 2 lines, expected as many as one .*'logits0': \[-1, 3\]"),
        (colours(outputs=2), labels, r"got 3 lines, expected as many as one .*'logits1': \[-1, 3\]"),
        (colours(), ["--labels", latin], "latin.txt: got .* can't decode .*, expected 2 to 4096 lines of UTF-8. Write"),
        (colours(), ["--labels", gap], f"gap.txt line 2: got '', {a_label}"),
        (colours(), ["--labels", ends], f"ends.txt line 4: got '', {a_label}"),
        (colours(), ["--labels", long], rf"long.txt line 2: got 'xxx.*4097 characters\), {a_label}"),
        (colours(), ["--labels", single], "single.txt: got 1 lines, expected 2 to 4096 lines of UTF-8. Write"),
        (colours(), ["--labels", many], "many.txt: got 4097 lines, expected 2 to 4096 lines of UTF-8. Write"),
        (colours(), ["--labels", tmp_path / "no"], "got No such file or directory, expected 2 to 4096 lines"),
        (colours(), [*image, "--inputs", tmp_path / "in.npz"], r"--inputs: got .*in.npz', expected a directory"),
    ):
        with pytest.raises(FewheadsError, match=message):
            packed(write(tmp_path / "model.onnx", data), *given)
        assert not (tmp_path / "models").exists()


def export(model, images, path, *, dynamo, outputs):
    """Write a network with a dynamic batch where its example has more than one image."""
    options = {"input_names": ["images"], "output_names": outputs, "external_data": False}
    if len(images) > 1:
        axes = {0: torch.export.Dim("batch")} if dynamo else {0: "batch"}
        options |= {"dynamic_shapes": (axes,)} if dynamo else {"dynamic_axes": {"images": axes, outputs[0]: axes}}
    torch.onnx.export(model.eval(), (images,), path, dynamo=dynamo, opset_version=18, **options)


def errors_of_tier(bundle, path, images, tier):
    """Return the RMS error of each output of a tier against ONNX Runtime alone, relative to its spread."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    runner = load_runner(bundle, "onnxruntime", bundle.path / "cache", tier=tier).runner
    try:
        got = runner.infer({"images": images})
    finally:
        runner.close()
    wanted = dict(zip(got, session.run(list(got), {"images": images}), strict=True))
    return [np.sqrt(np.square(got[name] - want).mean()) / (want.std() or 1) for name, want in wanted.items()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the exporters warn
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_networks_of_timm(name, dynamo, tmp_path):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    path = tmp_path / "model.onnx"
    export(timm.create_model(name), torch.randn(2, 3, 224, 224), path, dynamo=dynamo, outputs=["logits"])
    options = ("--name", "timm", "--repository", tmp_path, "--fp16", "--int8", "--max-batch-size", 4, "--json")
    bundle = Bundle.open(json.loads(invoke(pack, path, *options))["bundle"])
    images = np.random.default_rng(1).normal(size=(2, 3, 224, 224)).astype(np.float32)
    assert max(errors_of_tier(bundle, path, images, "x1")) < 1e-5
    assert 1e-5 < max(errors_of_tier(bundle, path, images, "x1-int8")) < largest_rms("int8")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_detector_of_torchvision_has_its_suppression_inside(tmp_path):
    detection = pytest.importorskip("torchvision").models.detection
    torch.manual_seed(0)
    model = detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, score_thresh=0.0)
    path, images = tmp_path / "model.onnx", np.random.default_rng(0).random((1, 3, 320, 320), np.float32)
    export(model, torch.from_numpy(images), path, dynamo=False, outputs=["boxes", "scores", "labels"])
    np.savez(tmp_path / "real.npz", images=images)
    options = ("--name", "ssd", "--repository", tmp_path, "--inputs", tmp_path / "real.npz", "--json")
    written = json.loads(invoke(pack, path, *options))
    assert "NonMaxSuppression" in written["only_onnxruntime"]
    others = np.random.default_rng(1).random((1, 3, 320, 320), np.float32)
    assert max(errors_of_tier(Bundle.open(written["bundle"]), path, others, "x1")) < 1e-5
