import io
import json
import struct
import sys

import msgspec
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from PIL import Image

from edge.bundles.bundle import Bundle
from edge.errors import BackendError, UsageError
from edge.launch import running_server
from export.cli.export import export
from export.cli.finetune import finetune
from export.data.examples import drawn
from export.data.images import ImageFolder, digits, mnist_splits, read_idx
from export.errors import DataError
from export.finetune.image_tasks import DIGITS, IMAGENET, MNIST
from export.finetune.models import open_model, open_tuned
from export.finetune.predictions import predict, read_predictions
from export.finetune.recipe import FinetuningRecipe
from export.finetune.run import finetune_run, prepare
from tests.support.image_model import encoded
from tests.support.sample_requests import column, triton_input
from tests.support.task_data import invoke, make_transformer, real, write_idx, write_model


def test_the_real_mnist():
    _, images = mnist_splits(real("mnist"))
    assert (images.pixels.shape, images.pixels.min(), images.pixels.max()) == ((10_000, 1, 28, 28), -1, 1)
    assert np.bincount(images.targets).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def test_idx(tmp_path):
    values = np.arange(24).reshape(2, 3, 4)
    write_idx(tmp_path / "a.gz", values)
    assert np.array_equal(read_idx(tmp_path / "a.gz", dimensions=3), values)
    for broken, message in (
        ({"values": values[:1], "header": struct.pack(">HBB3I", 0, 8, 3, 2, 3, 4)}, "28 bytes .* with 00000803"),
        ({"values": values, "header": struct.pack(">HBB3I", 0, 9, 3, 2, 3, 4)}, "begin with 00000903"),
        ({"values": values[0]}, "begin with 00000802"),
    ):
        write_idx(tmp_path / "b.gz", **broken)
        with pytest.raises(DataError, match=message):
            read_idx(tmp_path / "b.gz", dimensions=3)
    (tmp_path / "c.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="expected an IDX file in gzip"):
        read_idx(tmp_path / "c.gz", dimensions=3)
    write_idx(tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz", np.zeros((2, 4, 4)))
    write_idx(tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz", np.zeros(3))
    with pytest.raises(DataError, match="got 3 labels, expected 2"):
        mnist_splits(tmp_path / "mnist")


def test_digits(monkeypatch):
    pytest.importorskip("sklearn", reason="scikit-learn is absent")
    images = digits()
    assert (images.pixels.shape, images.pixels.min(), images.pixels.max()) == ((1797, 1, 8, 8), -1, 1)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        digits()


def test_image_folder(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"expected CLASS/NAME\.jpg"):
        ImageFolder(tmp_path, 16)
    for name, colour, size in (("red", (255, 0, 0), (40, 20)), ("blue", (0, 0, 255), (8, 31))):
        (tmp_path / name).mkdir()
        Image.new("RGB", size, colour).save(tmp_path / name / "0.png")
    folder = ImageFolder(tmp_path, 16)
    assert folder.classes == ("blue", "red")
    with pytest.raises(DataError, match="got 'blue', expected one of the 2 classes to learn: green, red"):
        ImageFolder(tmp_path, 16, ("green", "red"))
    batch = folder.batch(np.array([1, 0]))
    assert (batch.inputs.shape, batch.targets.tolist()) == ((2, 3, 16, 16), [1, 0])
    assert (batch.inputs[0, :, 5, 5].tolist(), batch.inputs[1, :, 0, 15].tolist()) == ([1, -1, -1], [-1, -1, 1])
    (tmp_path / "red" / "1.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"got bytes that begin with .* expected JPEG or PNG"):
        ImageFolder(tmp_path, 16).batch(np.array([2]))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(BackendError, match="Install the extra 'images'"):
        ImageFolder(tmp_path, 16)


SHAPE = ("--dim", 16, "--depth", 2, "--heads", 2)
OPTIONS = ("--lr", 1e-2, "--batch", 16)


def write_mnist(root, number, part="t10k", size=28, seed=0):
    """Write images of ten classes: a bright row for each."""
    random = np.random.default_rng(seed)
    labels = np.arange(number) % 10
    pixels = random.integers(0, 60, size=(number, size, size))
    for image, label in zip(pixels, labels, strict=True):
        image[2 * label : 2 * label + 2] += 150
    write_idx(root / "mnist" / f"{part}-images-idx3-ubyte.gz", pixels)
    write_idx(root / "mnist" / f"{part}-labels-idx1-ubyte.gz", labels)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with images, and a run on them from random weights."""
    root = tmp_path_factory.mktemp("images")
    write_mnist(root, 300)
    invoke(finetune, "mnist", *SHAPE, "--data-dir", root, "--out", root, "--epochs", 8, *OPTIONS, "--final")
    return root


def sizes(data):
    return [len(rows.targets) for rows in (data.train, data.holdout, data.dev["dev"])]


def prepared(task, root, model=None, **shape):
    return prepare(task, root, task.reader(task.source(model, shape)), max_length=1, limit=None)


def test_the_run_records_and_rebuilds_the_model(place):
    run = place / "MNIST"
    data = prepared(MNIST, place)
    assert sizes(data) == [216, 24, 60]
    kept, again = read_predictions(run, "dev"), predict(open_tuned(run, "MNIST"), data.dev["dev"])
    assert np.array_equal(kept.logits, again.logits)
    assert (kept.answers == kept.targets).mean() > 0.8
    config = open_model(run).transformer.config
    assert (config.dim, len(config.layers), config.layers[0].num_heads, config.patch_size) == (16, 2, 2, 7)
    assert "random weights" in (run / "config.json").read_text()


def test_new_weights_come_from_the_seed(place, tmp_path):
    arguments = ("--data-dir", place, "--out", tmp_path, "--epochs", 1, "--limit", 32, "--seeds", 2)
    runs = json.loads(invoke(finetune, "MNIST", *SHAPE, *arguments, *OPTIONS, "--json"))["runs"]
    assert runs == [str(tmp_path / f"MNIST-seed{seed}") for seed in (0, 1)]
    one, other = (open_model(run).transformer.embeddings.position.weight for run in runs)
    assert not np.allclose(one.detach(), other.detach())
    assert max(float(weight.detach().std()) for weight in (one, other)) < 0.1


def test_the_official_training_set_is_preferred_and_digits_are_split(tmp_path):
    write_mnist(tmp_path, 40)
    write_mnist(tmp_path, 100, part="train", seed=1)
    assert sizes(prepared(MNIST, tmp_path)) == [90, 10, 40]
    pytest.importorskip("sklearn", reason="scikit-learn is absent")
    assert sizes(prepared(DIGITS, ".")) == [1293, 144, 360]


@pytest.fixture
def folders(tmp_path):
    """A directory in ImageNet's layout, two colours for classes."""
    for part, number in (("train", 20), ("val", 3)):
        for name, colour in (("n01", "red"), ("n02", "blue")):
            folder = tmp_path / "imagenet" / part / name
            folder.mkdir(parents=True)
            for index in range(number):
                Image.new("RGB", (24 + index, 20), colour).save(folder / f"{index}.png")
    return tmp_path


def test_imagenet(folders):
    data = prepared(IMAGENET, folders)
    assert (data.labels, sizes(data), len({*data.train.keys, *data.holdout.keys})) == (("n01", "n02"), [36, 4, 6], 40)
    batch = data.dev["dev"].batch(np.array([0, 5]))
    assert (batch.inputs.shape, batch.targets.tolist()) == ((2, 3, 224, 224), [0, 1])
    (folders / "imagenet" / "val" / "n02").rename(folders / "imagenet" / "val" / "n03")
    with pytest.raises(DataError, match="val: got 'n03', expected one of the 2 classes"):
        prepared(IMAGENET, folders)


def test_data_that_are_no_images(tmp_path):
    with pytest.raises(DataError, match=r"t10k-images.*No such file.*of MNIST"):
        prepared(MNIST, tmp_path)
    write_mnist(tmp_path, 0)
    with pytest.raises(DataError, match="MNIST training set: got 0, expected 1 or more examples"):
        prepared(MNIST, tmp_path)
    write_mnist(tmp_path, 20, size=20)
    with pytest.raises(UsageError, match=r"got 20 x 20 pixels of 1 colours, expected 28 x 28 .*leave --model out"):
        prepared(MNIST, tmp_path)
    write_mnist(tmp_path, 20)
    write_idx(tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz", np.full(20, 10))
    with pytest.raises(DataError, match="got 10, expected labels 0 to 9"):
        prepared(MNIST, tmp_path)


def test_models_that_do_not_see_these_images(place, folders, tmp_path):
    write_model(tmp_path / "text", make_transformer())
    for task, root, model, shape, message in (
        (MNIST, place, tmp_path / "text", {}, r"got 'bert', expected a ViT.*leave --model out"),
        (IMAGENET, folders, place / "MNIST", {}, "images of ImageNet: got 28 x 28 pixels of 3 colours, expected 28"),
        (MNIST, place, place / "MNIST", {"depth": 3}, "--depth: got 3, expected nothing beside --model"),
        (MNIST, place, None, {"heads": 5}, "--heads: got 5, expected a divisor of the width, 64"),
    ):
        with pytest.raises(UsageError, match=message):
            prepared(task, root, model, **shape)


def test_teachers_that_see_something_else(place, tmp_path):
    source = msgspec.structs.replace(MNIST.source(None, {"dim": 16, "heads": 2}), patch_size=14)
    reader, options = MNIST.reader(source), {"seed": 0, "max_length": 1, "teacher": place / "MNIST"}
    data = prepare(MNIST, place, reader, max_length=1, limit=16)
    with pytest.raises(UsageError, match=r"in patches of 7 and 10 outputs: 0, .*, expected .* in patches of 14"):
        finetune_run(MNIST, source, data, reader, tmp_path / "run", FinetuningRecipe(), **options)
    with pytest.raises(UsageError, match=r"got 'MNIST', expected digits"):
        open_tuned(place / "MNIST", "digits")


def test_exported_run_reads_files_as_it_was_trained(tmp_path):
    """Digits as PNG and JPEG files, from a stock client, beside torch on the same pixels."""
    pytest.importorskip("sklearn", reason="scikit-learn is absent")
    invoke(finetune, "digits", *SHAPE, "--out", tmp_path, "--epochs", 2, *OPTIONS)
    options = ("--name", "digits", "--repository", tmp_path, "--artifacts", "onnxruntime")
    invoke(export, tmp_path / "digits", *options)
    bundle = Bundle.open(tmp_path / "digits-1")
    assert [tier.name for tier in bundle.manifest.tiers] == ["x1", "x1-int8"]
    assert bundle.manifest.postprocess.labels == tuple("0123456789")
    assert bundle.golden.raw["image"].shape == (32, 1)
    held = prepared(DIGITS, ".").holdout
    np.testing.assert_allclose(bundle.golden.inputs["pixels"][0], held.pixels[drawn(held.keys, 32)[0]], atol=1.01 / 255)

    levels = np.rint(digits().pixels[:8, 0] * 127.5 + 127.5).astype(np.uint8)
    kinds = ("PNG", "JPEG") * 4
    files = [encoded(Image.fromarray(image), kind) for image, kind in zip(levels, kinds, strict=True)]
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(file)), np.float32) for file in files])[:, None] / 127.5 - 1
    with torch.no_grad():
        logits = open_tuned(tmp_path / "digits", "digits")(torch.from_numpy(pixels))
    probabilities, classes = logits.softmax(dim=1).topk(3)
    with (
        running_server([bundle.path], cache=tmp_path / "cache") as ready,
        triton.InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client,
    ):
        wanted = [triton.InferRequestedOutput("probabilities", class_count=3), triton.InferRequestedOutput("label")]
        result = client.infer("digits", [triton_input("image", column(*files))], outputs=wanted)
    assert result.as_numpy("label")[:, 0].tolist() == [b"%d" % row[0] for row in classes.tolist()]
    ranked = [[text.split(b":") for text in row] for row in result.as_numpy("probabilities").tolist()]
    assert [[int(label) for _, _, label in row] for row in ranked] == classes.tolist()
    np.testing.assert_allclose([[float(v) for v, _, _ in row] for row in ranked], probabilities, atol=1e-4)


def test_large_images_of_a_folder_are_scaled_down_for_the_golden_set(folders):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (900, 600, 3), np.uint8))
    image.save(folders / "imagenet" / "val" / "n01" / "0.png")
    small, large = ImageFolder(folders / "imagenet" / "val", 224).files(np.array([1, 0]))
    assert small == (folders / "imagenet" / "val" / "n01" / "1.png").read_bytes()
    assert Image.open(io.BytesIO(large)).size == (341, 512)
