"""Own data in each format that the documents name: by commands from the file or directory to a served answer."""

import csv
import json
import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from edge.bundles.image import ImagePreprocessor
from edge.launch import running_server
from export.cli.export import export
from export.cli.finetune import finetune
from export.data.images import image_step
from export.data.tokens import load_tokenizer
from export.finetune.models import open_model
from tests.support.commands import shown
from tests.support.task_data import invoke, make_sentiment

#: Made by Hugging Face's datasets; its classes are good and bad.
SAVED = Path(__file__).parents[1] / "data" / "own_data" / "saved"
PICTURES = "pictures"
TEXTS = ("the film was good", "awful plot", "a nice cat")
ROWS = [{"text": text, "label": ("bad", "good")[label]} for text, label in dict(make_sentiment(120)).items()]


def write_table(path, delimiter):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, ("text", "label"), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def write_jsonl(root):
    (root / "reviews.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return root / "reviews.jsonl"


def write_parquet(root):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), root / "reviews.parquet")
    return root / "reviews.parquet"


def write_splits(root):
    (root / "splits").mkdir()
    for name in ("train", "dev"):
        write_table(root / "splits" / f"{name}.csv", ",")
    return root / "splits"


def copy_saved(root):
    pytest.importorskip("pyarrow")
    return shutil.copytree(SAVED, root / "saved")


def write_pictures(root):
    for number in range(40):
        folder = root / "pictures" / ("dark", "bright")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (100 * (number % 2) + number, 20, 30)).save(folder / f"{number}.png")
    return root / "pictures"


#: Name to a function that writes data below a directory, and returns their path.
FORMATS = {
    "csv": lambda root: write_table(root / "reviews.csv", ","),
    "tsv": lambda root: write_table(root / "reviews.tsv", "\t"),
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "splits": write_splits,
    "saved": copy_saved,
    PICTURES: write_pictures,
}


@pytest.fixture(scope="module")
def exported(place):
    """Return a function that trains on a format once, and returns the run; its bundle is in the same directory."""

    @cache
    def export_run(name):
        model = ("--dim", 16, "--depth", 1) if name == PICTURES else ("--model", place / "small", "--max-length", 32)
        options = ("--epochs", 1, "--no-report", "--name", name, "--out", place / "runs")
        (place / name).mkdir()
        invoke(finetune, "--data", FORMATS[name](place / name), *model, *options)
        quick = ("--artifacts", "onnxruntime", "--no-measure", "--name", name)
        invoke(export, place / "runs" / name, "--repository", place / "runs", *quick)
        return place / "runs" / name

    return export_run


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_becomes_a_bundle(name, exported):
    assert exported(name).is_dir()


def test_each_format_reaches_a_served_answer(exported, place, tmp_path):
    names = [name for name in FORMATS if name not in ("parquet", "saved") or find_spec("pyarrow")]
    bundles = [exported(name).with_name(f"{name}-1") for name in names]
    with running_server(bundles, target="onnxruntime", cache=tmp_path) as ready:
        for name in names:
            found = open_model(exported(name))
            if name == PICTURES:
                sent = sorted((place / name).glob("*/*/1*.png"))[:3]
                step = ImagePreprocessor(image_step(8, 3))
                inputs = [torch.from_numpy(step.read(one.read_bytes(), "image")[None]) for one in sent]
            else:
                sent, tokenizer = TEXTS, load_tokenizer(exported(name))
                inputs = [torch.tensor([tokenizer.encode(text).ids]) for text in sent]
            asked = ("infer", name, *sent, "--url", f"127.0.0.1:{ready.grpc_port}", "--json")
            outputs = json.loads(shown(*asked))["outputs"]
            with torch.no_grad():
                logits = np.stack([found.head(one)[0].numpy() for one in inputs])
            np.testing.assert_allclose(outputs["logits"], logits, atol=1e-4, err_msg=name)
            assert outputs["label"] == [[found.architecture.labels[number]] for number in logits.argmax(axis=1)], name
