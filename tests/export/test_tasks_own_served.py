"""Own data in each format that the documents name: by commands from the file or directory to a served answer."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from edge.bundles.image import ImagePreprocessor
from edge.launch import running_server
from export.cli import export
from export.tasks.cli import finetune
from export.tasks.images import image_step
from export.tasks.models import open_model
from export.tasks.tokens import load_tokenizer
from tests.support.commands import shown
from tests.support.task_data import invoke, make_sentiment

#: Made by Hugging Face's datasets; its classes are good and bad.
SAVED = Path(__file__).parents[1] / "data" / "own_data" / "saved"
TEXTS = ("the film was good", "awful plot", "a nice cat")
ROWS = [{"text": text, "label": ("bad", "good")[label]} for text, label in dict(make_sentiment(120)).items()]


def tables(root):
    """Write the rows in each format of a table, and return the paths."""
    for suffix, delimiter in ((".csv", ","), (".tsv", "\t")):
        with open(root / f"reviews{suffix}", "w", newline="") as file:
            writer = csv.DictWriter(file, ("text", "label"), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(ROWS)
    (root / "reviews.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (root / "parts").mkdir()
    for name in ("train", "dev"):
        shutil.copy(root / "reviews.csv", root / "parts" / f"{name}.csv")
    return [root / name for name in ("reviews.csv", "reviews.tsv", "reviews.jsonl", "parts")]


def arrow(root):
    """Write the formats that need pyarrow, and return the paths; none without it."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return []
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), root / "reviews.parquet")
    return [root / "reviews.parquet", shutil.copytree(SAVED, root / "saved")]


def folders(root):
    """Write pictures, of which each directory is a class, and return the directory."""
    for number in range(40):
        folder = root / "pictures" / ("dark", "bright")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (100 * (number % 2) + number, 20, 30)).save(folder / f"{number}.png")
    return root / "pictures"


def test_each_format_of_own_data_reaches_a_served_answer(place, tmp_path):
    options = ("--epochs", 1, "--lr", 1e-2, "--max-length", 32, "--no-report", "--out", tmp_path / "runs")
    names = {}
    for number, path in enumerate((*tables(tmp_path), *arrow(tmp_path), folders(tmp_path))):
        names[path] = f"format-{number}"
        shape = ("--dim", 16, "--depth", 1) if path.name == "pictures" else ("--model", place / "small")
        invoke(finetune, "--data", path, *shape, *options, "--name", names[path])
        quick = ("--artifacts", "onnxruntime", "--no-measure", "--name", names[path])
        invoke(export, tmp_path / "runs" / names[path], "--repository", tmp_path / "models", *quick)
    bundles = [tmp_path / "models" / f"{name}-1" for name in names.values()]
    with running_server(bundles, target="onnxruntime", cache=tmp_path / "cache") as ready:
        for path, name in names.items():
            run = tmp_path / "runs" / name
            found, tokenizer = open_model(run), None if path.name == "pictures" else load_tokenizer(run)
            pictures = sorted((tmp_path / "pictures").glob("*/1*.png"))[:3]
            sent = TEXTS if tokenizer else pictures
            asked = ("infer", name, *sent, "--url", f"127.0.0.1:{ready.grpc_port}", "--json")
            outputs = json.loads(shown(*asked))["outputs"]
            if tokenizer:
                inputs = [torch.tensor([tokenizer.encode(text).ids]) for text in TEXTS]
            else:
                step = ImagePreprocessor(image_step(8, 3))
                inputs = [torch.from_numpy(step.read(one.read_bytes(), "image")[None]) for one in pictures]
            with torch.no_grad():
                logits = np.stack([found.head(one)[0].numpy() for one in inputs])
            np.testing.assert_allclose(outputs["logits"], logits, atol=1e-4, err_msg=str(path))
            labels = [[found.architecture.labels[number]] for number in logits.argmax(axis=1)]
            assert outputs["label"] == labels, path
