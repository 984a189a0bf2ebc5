import struct
import sys

import numpy as np
import pytest

from export.errors import DataError
from export.tasks.images import ImageFolder, digits, mnist, read_idx
from tests.support.task_data import real, write_idx


def test_the_real_mnist():
    images = mnist(real("mnist").parent)
    assert images.pixels.shape == (10_000, 1, 28, 28)
    assert (images.pixels.min(), images.pixels.max()) == (-1, 1)
    assert np.bincount(images.targets).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def test_idx(tmp_path):
    values = np.arange(24).reshape(2, 3, 4)
    write_idx(tmp_path / "a.gz", values)
    assert np.array_equal(read_idx(tmp_path / "a.gz", dimensions=3), values)
    for broken, message in (
        (
            {"values": values[:1], "header": struct.pack(">HBB3I", 0, 8, 3, 2, 3, 4)},
            "28 bytes that begin with 00000803",
        ),
        ({"values": values, "header": struct.pack(">HBB3I", 0, 9, 3, 2, 3, 4)}, "begin with 00000903"),
        ({"values": values[0]}, "begin with 00000802"),
    ):
        write_idx(tmp_path / "b.gz", **broken)
        with pytest.raises(DataError, match=message):
            read_idx(tmp_path / "b.gz", dimensions=3)
    (tmp_path / "c.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="expected an IDX file in gzip"):
        read_idx(tmp_path / "c.gz", dimensions=3)


def test_mnist_needs_a_label_for_each_image(tmp_path):
    write_idx(tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz", np.zeros((2, 4, 4)))
    write_idx(tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz", np.zeros(3))
    with pytest.raises(DataError, match="got 3 labels, expected 2"):
        mnist(tmp_path)


def test_digits(monkeypatch):
    pytest.importorskip("sklearn", reason="scikit-learn is absent")
    images = digits()
    assert images.pixels.shape == (1797, 1, 8, 8)
    assert (images.pixels.min(), images.pixels.max()) == (-1, 1)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        digits()


def test_image_folder(tmp_path):
    pillow = pytest.importorskip("PIL.Image", reason="Pillow is absent")
    for name, colour, size in (("red", (255, 0, 0), (40, 20)), ("blue", (0, 0, 255), (8, 31))):
        (tmp_path / name).mkdir()
        pillow.new("RGB", size, colour).save(tmp_path / name / "0.png")
    folder = ImageFolder(tmp_path, 16)
    assert folder.classes == ("blue", "red")
    batch = folder.batch(np.array([1, 0]))
    assert batch.inputs.shape == (2, 3, 16, 16)
    assert batch.targets.tolist() == [1, 0]
    assert batch.inputs[0, :, 5, 5].tolist() == [1, -1, -1]
    assert batch.inputs[1, :, 0, 15].tolist() == [-1, -1, 1]
    (tmp_path / "red" / "1.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="expected an image"):
        ImageFolder(tmp_path, 16).batch(np.array([2]))


def test_image_folder_without_images_or_pillow(tmp_path, monkeypatch):
    pytest.importorskip("PIL.Image", reason="Pillow is absent")
    with pytest.raises(DataError, match=r"expected CLASS/NAME\.jpg"):
        ImageFolder(tmp_path, 16)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DataError, match="pip install pillow"):
        ImageFolder(tmp_path, 16)
