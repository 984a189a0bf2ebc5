import json
import shlex
import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from edge.bundles.bundle import Bundle
from edge.bundles.image import ImagePreprocessor
from edge.errors import UsageError
from edge.launch import running_server
from export.cli.compare import compare
from export.cli.export import export
from export.cli.finetune import finetune
from export.cli.plan import plan
from export.cli.reduce import reduce
from export.cli.report import report
from export.data.images import image_step
from export.data.tokens import load_tokenizer
from export.errors import DataError
from export.finetune.models import open_model
from export.finetune.predictions import read_predictions
from export.papers.adaptive.tables import MechanismRecord
from export.papers.experiment import read_records
from export.training.runs import CONFIG, REPORT, read_config
from tests.support.commands import shown
from tests.support.task_data import NEUTRAL, finished, invoke, make_sentiment, write_rows

TUNING = ("--lr", 2e-2, "--batch", 32, "--max-length", 32)
#: Longer than what bundles take of shorter data.
LONG = "good " * 5000
CALIBRATION = ("--calibration", 200, "--tokens", 8, "--target-speedup", 1.05)


def write_reviews(path, items):
    rows = [(text, "like" if label else "dislike", number) for number, (text, label) in enumerate(items)]
    write_rows(path, ("review", "stars", "id"), rows)


@pytest.fixture(scope="module")
def tuned(place):
    """A directory with a model, reviews with one text of HTML and a wrong label, and a run on them."""
    items = [*dict(make_sentiment(360)).items(), (LONG, 1)]
    write_reviews(place / "reviews.csv", items)
    write_reviews(
        place / "dev.csv", [*make_sentiment(60, 1), ("good nice <script>alert(1)</script> & good", 0), items[0]]
    )
    data = ("--data", place / "reviews.csv", "--dev", place / "dev.csv", "--label", "stars")
    invoke(finetune, *data, "--model", place / "model", "--out", place, *TUNING, "--final")
    return place


def test_a_holdout_or_dev_of_a_few_rows_is_refused_before_the_training(tuned, tmp_path):
    items = [*dict(make_sentiment(90)).items()]
    options = ("--label", "stars", "--model", tuned / "model", "--out", tmp_path, *TUNING)
    for number, dev, message in (
        (12, (), r"holdout: got 1, expected 4 or more examples\. Give more that differ; .* needs about 40\."),
        (60, ("--dev", tmp_path / "dev.csv"), "dev: got 3, expected 4 or more examples"),
    ):
        write_reviews(tmp_path / "few.csv", items[:number])
        write_reviews(tmp_path / "dev.csv", items[-3:])
        with pytest.raises(DataError, match=message):
            invoke(finetune, "--data", tmp_path / "few.csv", *dev, *options)
    assert not (tmp_path / "few").exists()


def test_a_run_on_own_data_has_a_report_with_escaped_texts_and_duplicates(tuned):
    run = tuned / "reviews"
    config = read_config(run)
    assert (config.data_dir, config.arguments["task"]) == (None, "reviews.csv")
    assert config.own_data.labels == ("dislike", "like")
    kept = read_predictions(run, "dev")
    assert (kept.answers == kept.targets).mean() > 0.9
    page = (run / REPORT).read_text()
    assert "good nice &lt;script&gt;alert(1)&lt;/script&gt; &amp; good" in page
    assert "<script" not in page
    found = json.loads(invoke(report, run, "--out", tuned / "page.html", "--json"))
    dev = {one["name"]: one for one in found["rows"]}["dev"]
    assert dev["rows"] == 62
    assert dev["in_train"] >= 1
    assert f"{dev['in_train']} of 62 items of dev are in the training split, too" in page
    (wrong,) = [one for one in found["splits"][1]["classes"]["errors"] if "<script>" in one["item"][0]]
    assert (wrong["target"], wrong["prediction"]) == ("dislike", "like")
    assert found["splits"][1]["classes"]["majority"] in ("dislike", "like")


@pytest.fixture(scope="module")
def taught(tuned):
    """The directory of that run with a smaller one, ``taught``, that had it as its teacher."""
    printed = invoke(reduce, tuned / "reviews", *CALIBRATION, "--out", tuned / "lean")
    invoke(finetune, *next_command(printed), "--epochs", 1, "--name", "taught", *TUNING, "--no-report", "--final")
    return tuned


def next_command(printed):
    """Return the arguments of the ``fewheads finetune`` that ``reduce`` has printed."""
    lines = printed.splitlines()
    program, command, *arguments = shlex.split(lines[lines.index("Next, restore its accuracy:") + 1])
    assert (program, command) == ("fewheads", "finetune")
    return arguments


def test_a_run_on_own_data_is_planned_reduced_and_taught(taught):
    assert not (taught / "taught" / REPORT).exists()
    small, lean, full = (open_model(taught / name).transformer.config for name in ("taught", "lean", "reviews"))
    assert small.layers == lean.layers != full.layers
    assert read_config(taught / "lean").own_data == read_config(taught / "reviews").own_data
    plans = json.loads(invoke(plan, taught / "reviews", *CALIBRATION, "--json"))["plans"]
    assert [layer["ffn_dim"] for layer in plans[0]["layers"]] == [shape.ffn_dim for shape in lean.layers]


def test_runs_on_own_data_are_exported_with_their_labels_and_texts(taught):
    runs = (taught / "reviews", taught / "taught")
    tiers = ("--tier-name", "x1", "--tier-name", "lean", "--artifacts", "onnxruntime")
    invoke(export, *runs, "--repository", taught / "models", "--name", "reviews", *tiers)
    bundle = Bundle.open(taught / "models" / "reviews-1")
    assert bundle.manifest.postprocess.labels == ("dislike", "like")
    assert bundle.manifest.description == "reviews.csv: dislike or like"
    assert "reviews.csv (SHA-256 " in bundle.manifest.provenance.data
    golden = {text.decode() for text in bundle.golden.raw["text"].ravel()}
    assert golden <= {text for text, _ in make_sentiment(360)} | {LONG.strip()}
    assert bundle.manifest.preprocess.max_text_bytes == len(LONG.strip())


@pytest.mark.slow
def test_mechanisms_are_compared_on_own_data(tuned):
    options = ("--only", "literal", "--epochs", 1, "--limit", 200)
    compared = json.loads(invoke(compare, tuned / "reviews", "--out", tuned / "compared", *options, "--json"))
    assert [row[0] for row in compared["tables"][0]["rows"]] == ["full", "literal"]
    assert {record.metric for record in read_records(tuned / "compared", MechanismRecord).values()} == {"macro_f1"}


def test_values_and_pairs(tuned, tmp_path):
    """The score of a pair is the number of words that its texts share, over 2."""
    generator = np.random.default_rng(0)
    rows = []
    for _ in range(200):
        one, other = (set(generator.choice(NEUTRAL, 4, replace=False)) for _ in range(2))
        rows.append({"text_a": " ".join(sorted(one)), "text_b": " ".join(sorted(other)), "score": len(one & other) / 2})
    (tmp_path / "shared.jsonl").write_text("\n".join(map(json.dumps, rows)))
    # Six epochs, because the scores of fewer hardly differ, and an export in INT8 needs some that do.
    options = (*TUNING, "--epochs", 6, "--max-length", 128, "--out", tmp_path, "--final")
    invoke(finetune, "--data", tmp_path / "shared.jsonl", "--model", tuned / "model", *options)
    run = tmp_path / "shared"
    invoke(report, run, "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<p>Root mean squared error ") == page.count("<h3>Largest residuals</h3>") == 2
    found = json.loads(invoke(report, run, "--json"))
    (dev,) = [split["values"] for split in found["splits"] if split["name"] == "dev"]
    kept = read_predictions(run, "dev")
    residuals = kept.answers.astype(np.float64) - kept.targets
    assert dev["rmse"]["value"] == pytest.approx(np.sqrt((residuals**2).mean()))
    assert dev["errors"][0]["row"] == np.abs(residuals).argmax()
    assert [point[0] for point in dev["points"]] == kept.targets.tolist()
    assert {measure["metric"] for measure in found["metrics"]["measures"]} == {"pearson", "spearman"}
    assert "Largest residuals" in (tmp_path / "page.html").read_text()
    invoke(export, run, "--repository", tmp_path / "models", "--name", "shared", "--artifacts", "onnxruntime")
    manifest = Bundle.open(tmp_path / "models" / "shared-1").manifest
    assert [spec.name for spec in manifest.preprocess.inputs] == ["text", "text_pair"]
    assert manifest.postprocess.output == "score"
    assert manifest.preprocess.max_length == 64  # the model's: a server gets longer texts than those in the data


def test_images_in_folders(tuned, tmp_path):
    datasets, image = pytest.importorskip("sklearn.datasets"), pytest.importorskip("PIL.Image")
    digits = datasets.load_digits()
    for number in np.flatnonzero(digits.target < 3)[:240]:
        folder = tmp_path / "digits" / f"class {digits.target[number]}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = (digits.images[number] * (255 / 16)).astype(np.uint8)
        image.fromarray(pixels).save(folder / f"{number}.png")
    (tmp_path / "digits" / "class 1" / "x.webp").touch()
    command = ("--data", tmp_path / "digits", "--dim", 16, "--depth", 1, "--heads", 1, "--epochs", 16, "--lr", 1e-2)
    tuning = finished(finetune, *command, "--name", "run", "--out", tmp_path, "--final")
    assert "digits/: images that are neither JPEG nor PNG are left out: 1" in tuning.stderr
    run = tmp_path / "run"
    config = read_config(run)
    assert config.arguments["labels"] == ["class 0", "class 1", "class 2"]
    assert (config.own_data.image_size, config.own_data.files[0].rows) == (8, 240)
    kept = read_predictions(run, "dev")
    assert (kept.answers == kept.targets).mean() > 0.8
    page, wrong = (run / REPORT).read_text(), (kept.answers != kept.targets).sum()
    held = read_predictions(run, "holdout")
    assert page.count('<img src="data:image/png;base64,') == min(wrong, 20) + (held.answers != held.targets).sum()
    printed = invoke(reduce, run, "--calibration", 150, "--target-speedup", 1.02, "--out", tmp_path / "lean")
    assert read_config(tmp_path / "lean").own_data == config.own_data
    invoke(finetune, *next_command(printed), "--epochs", 1, "--no-report")
    assert read_config(tmp_path / "lean-taught").own_data == config.own_data
    (tmp_path / "digits" / "class 1" / "x.png").write_bytes(b"GIF89a")
    with pytest.raises(DataError, match=r"file digits/: got 241 rows .* expected 240 rows .*fewheads finetune --data"):
        invoke(report, run, "--replace")
    for arguments, message in (
        ((), r"image .*class 1/x\.png: got GIF, expected JPEG or PNG\. Remove it, convert it, or scale it down"),
        (("--label", "digit"), "expected tables with these options; the classes of images are their directories"),
    ):
        with pytest.raises((DataError, UsageError), match=message):
            invoke(finetune, *command, *arguments, "--name", "other", "--out", tmp_path)


@pytest.mark.parametrize("moved", [False, True])
def test_own_data_are_not_replaced_where_they_were_recorded_or_are_now(tuned, tmp_path, moved):
    run, files, held = tmp_path / "run", [tmp_path / "reviews.csv", tmp_path / "dev.csv"], tmp_path / "held"

    def record(*places):
        path, dev = (str(tmp_path / "gone" / one.name if moved else one) for one in places)
        own = msgspec.structs.replace(config.own_data, path=path, dev=dev)
        (run / CONFIG).write_bytes(msgspec.json.encode(msgspec.structs.replace(config, own_data=own)))

    shutil.copytree(tuned / "reviews", run)
    config = read_config(run)
    record(*files)
    for file in files:
        shutil.copy(tuned / file.name, file)
    place = ("--data-dir", tmp_path, "--replace")
    for file in files:
        kept = file.read_bytes()
        with pytest.raises(UsageError, match=f"{file}: got the path of the data in {file}, expected a path apart"):
            invoke(report, run, "--out", file, *place)
        with pytest.raises(UsageError, match=f"got a path inside of the data in {file}, expected a path apart"):
            invoke(compare, run, "--out", file / "compared", *place[:2])
        assert file.read_bytes() == kept
    held.mkdir()
    record(files[0], held)
    with pytest.raises(UsageError, match=f"got a path inside of the data in {held}, expected a path apart"):
        invoke(export, run, "--repository", held, "--name", "reviews", *place)


def test_options_that_do_not_go_together(tuned, tmp_path):
    for arguments, message in (
        ((), "TASK: got nothing, expected a task, or --data with a path"),
        (("SST-2", "--data", tuned / "reviews.csv"), "TASK: got 'SST-2', expected nothing beside --data"),
        (("SST-2", "--label", "stars"), "--label: got 'stars', expected --data"),
        (("SST-2", "--regression"), "--regression: got this option, expected --data"),
        (("--data", tuned / "reviews.csv", *["--text", "review"] * 3), "--text: got .* two for pairs"),
        (("--data", tuned, "--out", tuned / "runs"), "a path inside of the data in"),
        (("--data", tuned / "missing.csv"), r"missing\.csv: got nothing there, expected a table"),
    ):
        with pytest.raises((UsageError, DataError), match=message):
            invoke(finetune, "--model", tuned / "model", "--out", tmp_path, *arguments)


#: Made by Hugging Face's datasets; its classes are good and bad.
SAVED = Path(__file__).parents[1] / "data" / "own_data" / "saved"
PICTURES = "pictures"
TEXTS = ("the film was good", "awful plot", "a nice cat")
ROWS = [(text, ("bad", "good")[label]) for text, label in dict(make_sentiment(120)).items()]


def write_table(name):
    return lambda root: write_rows(root / name, ("text", "label"), ROWS)


def write_splits(root):
    for name in ("train.csv", "dev.csv"):
        write_table(f"splits/{name}")(root)
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
    **{ending: write_table(f"reviews.{ending}") for ending in ("csv", "tsv", "jsonl", "parquet")},
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
