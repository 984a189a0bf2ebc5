import json

import numpy as np
import pytest

from edge.errors import UsageError
from export.errors import DataError
from export.tasks.cli import finetune
from export.tasks.models import open_model, open_tuned
from export.tasks.predictions import predict, read_predictions
from export.tasks.recipe import Recipe
from export.tasks.run import finetune_run, prepare
from export.tasks.vision import DIGITS, IMAGENET, MNIST
from tests.support.marks import with_transformers
from tests.support.task_data import invoke, make_transformer, real, reduce_and_teach, write_idx, write_model

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
    invoke(finetune, "mnist", *SHAPE, "--data-dir", root, "--out", root, "--epochs", 8, *OPTIONS)
    return root


def prepared(task, root, model=None, **shape):
    source = task.source(model, shape)
    return prepare(task, root, task.reader(source), max_length=1, limit=None)


def test_the_run_records_and_rebuilds_the_model(place):
    run = place / "MNIST"
    data = prepared(MNIST, place)
    assert [len(rows.targets) for rows in (data.train, data.holdout, data.dev["dev"])] == [216, 24, 60]
    kept, again = read_predictions(run, "dev"), predict(open_tuned(run, "MNIST"), data.dev["dev"])
    assert np.array_equal(kept.logits, again.logits)
    assert sorted(path.name for path in run.iterdir()) == [
        "config.json",
        "metrics.json",
        "predictions.npz",
        "weights.safetensors",
    ]
    (dev,) = [m for m in json.loads((run / "metrics.json").read_text())["measures"] if m["split"] == "dev"]
    assert dev["metric"] == "accuracy"
    assert dev["value"] == (kept.answers == kept.targets).mean() > 0.8
    assert (dev["n"], len(dev["interval"])) == (60, 2)
    config = open_model(run).transformer.config
    assert (config.dim, len(config.layers), config.layers[0].num_heads, config.patch_size) == (16, 2, 2, 7)
    assert "random weights" in (run / "config.json").read_text()


def test_new_weights_come_from_the_seed(place, tmp_path):
    arguments = ("--data-dir", place, "--out", tmp_path, "--epochs", 1, "--limit", 32, "--seeds", 2)
    runs = json.loads(invoke(finetune, "MNIST", *SHAPE, *arguments, *OPTIONS, "--json"))["runs"]
    one, other = (open_model(run).transformer.embeddings.position.weight for run in runs)
    assert not np.allclose(one.detach(), other.detach())
    assert max(float(weight.detach().std()) for weight in (one, other)) < 0.1


def test_the_official_training_set_is_preferred(tmp_path):
    write_mnist(tmp_path, 40)
    write_mnist(tmp_path, 100, part="train", seed=1)
    data = prepared(MNIST, tmp_path)
    assert [len(rows.targets) for rows in (data.train, data.holdout, data.dev["dev"])] == [90, 10, 40]


def test_digits_are_split():
    pytest.importorskip("sklearn", reason="scikit-learn is absent")
    data = prepared(DIGITS, ".")
    assert [len(rows.targets) for rows in (data.train, data.holdout, data.dev["dev"])] == [1293, 144, 360]
    assert data.labels == tuple("0123456789")


@pytest.fixture
def folders(tmp_path):
    """A directory in ImageNet's layout, two colours for classes."""
    pillow = pytest.importorskip("PIL.Image", reason="Pillow is absent")
    for part, number in (("train", 10), ("val", 3)):
        for name, colour in (("n01", "red"), ("n02", "blue")):
            folder = tmp_path / "imagenet" / part / name
            folder.mkdir(parents=True)
            for index in range(number):
                pillow.new("RGB", (24 + index, 20), colour).save(folder / f"{index}.png")
    return tmp_path


def test_imagenet(folders):
    data = prepared(IMAGENET, folders)
    assert data.labels == ("n01", "n02")
    assert [len(rows.targets) for rows in (data.train, data.holdout, data.dev["dev"])] == [18, 2, 6]
    names = {*data.train.keys, *data.holdout.keys}
    assert len(names) == 20
    batch = data.dev["dev"].batch(np.array([0, 5]))
    assert batch.inputs.shape == (2, 3, 224, 224)
    assert batch.targets.tolist() == [0, 1]
    (folders / "imagenet" / "val" / "n02").rename(folders / "imagenet" / "val" / "n03")
    with pytest.raises(DataError, match="val: got 'n03', expected one of the 2 classes"):
        prepared(IMAGENET, folders)


def test_data_that_are_no_images(tmp_path):
    with pytest.raises(DataError, match=r"t10k-images.*No such file.*of MNIST"):
        prepared(MNIST, tmp_path)
    write_mnist(tmp_path, 0)
    with pytest.raises(DataError, match="MNIST training set: got no examples, expected one at least"):
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
    with pytest.raises(UsageError, match=r"got 'bert', expected a ViT.*leave --model out"):
        prepared(MNIST, place, tmp_path / "text")
    with pytest.raises(UsageError, match="images of ImageNet: got 28 x 28 pixels of 3 colours, expected 28 x 28"):
        prepared(IMAGENET, folders, place / "MNIST")
    with pytest.raises(UsageError, match="--depth: got 3, expected nothing beside --model"):
        prepared(MNIST, place, place / "MNIST", depth=3)
    with pytest.raises(UsageError, match="--heads: got 5, expected a divisor of the width, 64"):
        prepared(MNIST, place, heads=5)


def test_teachers_that_see_something_else(place, tmp_path):
    source = MNIST.source(None, {"dim": 16, "heads": 2})
    coarse = source.__class__(**{**{f: getattr(source, f) for f in source.__struct_fields__}, "patch_size": 14})
    reader = MNIST.reader(coarse)
    data = prepare(MNIST, place, reader, max_length=1, limit=16)
    with pytest.raises(UsageError, match=r"in patches of 7 and 10 outputs, expected .* in patches of 14"):
        finetune_run(
            MNIST, coarse, data, reader, tmp_path / "run", Recipe(), seed=0, max_length=1, teacher=place / "MNIST"
        )
    with pytest.raises(UsageError, match=r"got 'MNIST', expected digits"):
        open_tuned(place / "MNIST", "digits")


@pytest.mark.slow
def test_a_run_is_reduced_and_taught(place, tmp_path):
    calibration = ("--calibration", 100, "--target-speedup", 1.02)
    assert reduce_and_teach("MNIST", place, tmp_path, *OPTIONS, calibration=calibration)["tokens"] == 17


@pytest.mark.slow
@with_transformers
def test_a_model_of_hugging_face(place, tmp_path):
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(image_size=28, patch_size=7, num_channels=1, **sizes)
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "model")
    arguments = ("--data-dir", place, "--out", tmp_path, "--epochs", 1, *OPTIONS)
    invoke(finetune, "MNIST", "--model", tmp_path / "model", *arguments)
    assert open_model(tmp_path / "MNIST").architecture.labels == tuple("0123456789")


@pytest.mark.slow
def test_the_real_mnist(tmp_path):
    root = real("mnist").parent
    options = ("--epochs", 1, "--lr", 1e-3, "--limit", 2000, "--out", tmp_path)
    told = json.loads(invoke(finetune, "MNIST", "--data-dir", root, *options, "--json"))
    accuracy = {measure["split"]: measure["value"] for measure in told["metrics"]["measures"]}
    assert accuracy["dev"] > 0.2
