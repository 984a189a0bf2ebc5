import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from edge.errors import UsageError
from export.cli.finetune import finetune
from export.errors import DataError
from export.finetune.own_texts import ColumnChoices, describe, own_task
from export.finetune.recipe import restoring_command
from export.training.provenance import provenance
from export.training.runs import OwnData, RunConfig
from tests.support.task_data import write_rows

#: Made by pandas and by Hugging Face's datasets.
MADE = Path(__file__).parents[1] / "data" / "own_data"

ROWS = [
    (f"the film {number} was {'good' if number % 2 else 'bad'}", ["bad", "good"][number % 2]) for number in range(40)
]


def written(root, name):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
        return MADE / name
    if name == "semicolons.csv":
        return write_rows(root / name, ("id", "Review", "Label"), [(1, *row) for row in ROWS], ";")
    return write_rows(root / name, ("text", "label"), ROWS)


def read(path, *arguments, dev=None, **choices):
    data = describe(Path(path), dev, ColumnChoices(*arguments, **choices))
    return data, own_task(data).examples("nowhere")


@pytest.mark.parametrize("name", ["reviews.csv", "semicolons.csv", "reviews.tsv", "reviews.jsonl", "reviews.parquet"])
def test_every_format_gives_the_same_examples(name, tmp_path):
    data, splits = read(written(tmp_path, name))
    parts = (splits.train, *splits.measured.values())
    assert (data.labels, [len(one.texts) for one in parts]) == (("bad", "good"), [28, 4, 8])
    pairs = [pair for one in parts for pair in zip(one.texts, one.targets, strict=True)]
    found = [(texts[0], data.labels[target]) for texts, target in pairs]
    assert sorted(found) == sorted(ROWS)


def test_a_saved_data_set_has_its_splits_and_class_names_and_its_unlabelled_split_is_left_out():
    pytest.importorskip("pyarrow")
    data, splits = read(MADE / "saved")
    assert (data.name, data.labels, list(splits.dev)) == ("saved/", ("good", "bad"), ["validation"])
    assert [(file.split, file.name.split("/")[0], file.rows) for file in data.files] == [
        ("train", "train", 20),
        ("train", "train", 20),
        ("validation", "validation", 12),
        ("", "test", 4),
    ]
    assert splits.dev["validation"].texts[1] == ("the film 1 was good",)
    assert splits.dev["validation"].targets.tolist() == [1, 0] * 6
    in_train = set(splits.train.texts) & set(splits.dev["validation"].texts)
    assert [(one.name, one.in_train) for one in data.splits] == [
        ("train", None),
        ("holdout", 0),
        ("validation", len(in_train)),
    ]
    assert 8 <= len(in_train) <= 12  # all twelve are in the file of the training set


def test_cells_of_csv_may_hold_delimiters_quotes_and_line_ends(tmp_path):
    odd = 'He said: "no, ""never"""\r\nand left'.replace('""', '"')
    path = tmp_path / "odd.csv"
    quoted, long = odd.replace('"', '""'), "word " * 40_000
    cells = [f'"{quoted} {number}",{number % 2}' for number in range(40)] + [f"{long},1"]
    path.write_bytes(("\ufefftext,label\r\n" + "\r\n".join(cells) + "\r\n\r\n").encode())
    _, splits = read(path)
    texts = {texts[0] for one in (splits.train, *splits.measured.values()) for texts in one.texts}
    assert texts == {*(f"{odd} {number}" for number in range(40)), long.strip()}


def test_the_label_column_decides_between_classes_and_values(tmp_path):
    def table(name, labels):
        return write_rows(
            tmp_path / name, ("text", "label"), [(f"text {row}", label) for row, label in enumerate(labels)]
        )

    stars = table("stars.csv", [row % 10 + 1 for row in range(100)])
    assert read(stars)[0].labels == tuple(map(str, range(1, 11)))  # 2 before 10
    data, splits = read(stars, regression=True)
    assert (data.labels, splits.train.targets.dtype, own_task(data).headline) == ((), np.float32, "spearman")
    assert read(table("halves.csv", [row % 6 / 2 for row in range(100)]))[0].labels == ()
    many = table("many.csv", [row % 21 - 10 for row in range(200)])
    assert (read(many)[0].labels, read(many, regression=False)[0].labels[:2]) == ((), ("-10", "-9"))
    bits = table("bits.csv", [row % 2 for row in range(100)])
    data, splits = read(bits, labels=("negative", "positive"))
    assert (data.values, data.labels) == (("0", "1"), ("negative", "positive"))
    (name,) = (texts[0] for texts in splits.train.texts[:1])
    assert splits.train.targets[0] == int(name.split()[1]) % 2
    assert read(table("words.csv", [row[1] for row in ROWS]), labels=("good", "bad"))[0].values == ("good", "bad")


def test_cells_of_tsv_are_taken_as_they_are(tmp_path):
    odd = [(f'" the \u2028 film\r was "good {row}', "good") for row in range(20)]
    _, splits = read(write_rows(tmp_path / "odd.tsv", ("text", "label"), [*odd, *ROWS]))
    texts = {texts[0] for one in (splits.train, *splits.measured.values()) for texts in one.texts}
    assert texts == {text for text, _ in (*odd, *ROWS)}


def test_columns_of_pairs_and_own_names(tmp_path):
    rows = [(f"a {row}", f"b {row}", row % 2, row) for row in range(40)]
    path = write_rows(tmp_path / "pairs.csv", ("premise", "hypothesis", "label", "id"), rows)
    assert read(path)[0].texts == ("premise", "hypothesis")
    data, splits = read(path, ("hypothesis",), "label")
    assert (data.texts, len(splits.train.texts[0])) == (("hypothesis",), 1)


def test_a_directory_with_files_for_each_split_and_a_dev_of_its_own(tmp_path):
    write_rows(tmp_path / "both" / "train.csv", ("text", "label"), ROWS)
    write_rows(tmp_path / "both" / "test.tsv", ("text", "label"), [*ROWS[:3], ("new", "good")])
    (tmp_path / "both" / "README.md").write_text("Reviews.")
    _, splits = read(tmp_path / "both")
    assert (list(splits.dev), len(splits.train.texts), len(splits.holdout.texts)) == (["test"], 36, 4)
    other = write_rows(tmp_path / "other.csv", ("text", "label"), [("other", "bad")])
    _, splits = read(tmp_path / "both", dev=other)
    assert {name: one.texts for name, one in splits.dev.items()} == {"dev": (("other",),)}
    _, splits = read(tmp_path / "both", dev=tmp_path / "both")
    assert len(splits.dev["dev"].texts) == 4  # of test.tsv
    write_rows(tmp_path / "both" / "dev.csv", ("text", "label"), ROWS[:4])
    with pytest.raises(DataError, match=r"--dev .*both: got the splits dev, test, train, expected one, or one out of"):
        read(tmp_path / "both", dev=tmp_path / "both")


HEAD = "text,label\n"
GOOD = "".join(f"{text},{label}\n" for text, label in ROWS)


ROW = '{"text": "a", "label": "b"}\n'
IDS = "".join(f"text {number},id{number}\n" for number in range(10_000))
QUARTERS = "".join(f"text {number},{number / 4}\n" for number in range(40))
SAME = "".join(f"the same,{number / 10}\n" for number in range(60))


def row(content, message, name="x.csv", **choices):
    return name, content, choices, message


@pytest.mark.parametrize(
    ("name", "content", "choices", "message"),
    [
        row("id,words\n1,a\n", r"--label: got no column with a common name, .* has the columns id, words"),
        row("id,label\n1,a\n", "--text: got no column with a common name"),
        row("text,review,label\na,b,c\n", "--text: got text and review, which could all be it"),
        row(HEAD + GOOD, "--text: got no column body, .* columns text, label: name one", texts=("body",)),
        row(HEAD + GOOD + "a,b,c\n", r"x\.csv line 42: got 3 cells, expected 2"),
        row("text\tlabel\n" + "a\n", r"x\.tsv line 2: got 1 cells, .* Quotes mean nothing in \.tsv", "x.tsv"),
        row(HEAD + GOOD + '"a,b\n', r"x\.csv line 42: got unexpected end of data"),
        row(HEAD + GOOD + '"a"b,c\n', r"x\.csv line 42: got .* expected a row of CSV"),
        row(HEAD + "caf\udce9,good\n", r"x\.csv line 2: got byte 0xe9, .* expected UTF-8"),
        row(HEAD + GOOD + " ,good\n", r"line 42 column text: got an empty cell, expected text"),
        row(HEAD + GOOD + "fine,\n", r"line 42 column label: got an empty cell, expected a label"),
        row(HEAD + GOOD + "a,NaN\n" * 12, r"line 42 column label: got 'NaN', expected a label\. .* remove"),
        row("text\tlabel\na\t<NA>\nb\tgood\n", r"x\.tsv line 2 column label: got '<NA>', expected a lab", "x.tsv"),
        row(ROW.replace('"b"', '" nan"') + ROW, "line 1 .* got ' nan', expected a label", "x.jsonl"),
        row("text,text,label\na,b,c\n", "heading: got 'text', expected each name once"),
        row(HEAD, "got no rows, expected one at least, below the heading"),
        row(HEAD + "a,yes\n" * 9, r"x\.csv column label: got the one class 'yes' in 9 examples"),
        row(HEAD + "a,good\nb,bad\n" * 9, r"class 'bad': got no examples left to train on, .*held out"),
        row(HEAD + GOOD + "a,god\nb,god\n", r"label: got 2 of 'god' \(.*x\.csv line 42\), expected 5 examples or more"),
        row(HEAD + GOOD, "got 0 of 'fair', .* leave the class out", labels=("bad", "good", "fair")),
        row(HEAD + IDS, r"got 10,000 classes in 10,000 examples, expected at most 4,096 .*--regression"),
        row(HEAD + QUARTERS + "a,n/a\n", r"line 42 column label: got 'n/a', expected a number"),
        row(HEAD + "a,1.5\nb,200.5\n", r"got '200\.5', expected a number from -10 to 10\. .*, or give --classi"),
        row(HEAD + "a,2\n" * 9, r"x\.csv column label: got the one value 2", regression=True),
        row(HEAD + GOOD, "line 3 column label: got 'good', .* give --labels all", labels=("bad", "fine")),
        row(HEAD + "a,0.0\nb,1.0\n" * 9, r"line 2 .*: got '0\.0', .* or new names for 0, 1", labels=("bad", "good")),
        row("", r"x: got 1 images in other formats, such as 1\.webp, expected images as \.jpg", "x/cat/1.webp"),
        row(HEAD + GOOD, r"--labels: got \['bad'\], expected two names or more", labels=("bad",)),
        row(ROW + '{"text": \n', r"x\.jsonl line 2: got .* expected a JSON object", "x.jsonl"),
        row(ROW + '{"text": "a", "label": 1}\n', "line 2 .* got a number, 1, expected text", "x.jsonl"),
        row('{"text": 7, "label": "b"}\n', r"line 1 column text: got 7, expected text", "x.jsonl"),
        row('{"text": "a", "label": ["b"]}\n', r"line 1 .* got \['b'\], expected text or a number", "x.jsonl"),
        row("", r"x\.xlsx: got a file \.xlsx, expected a table \(\.csv, \.tsv, \.jsonl or \.parquet\)", "x.xlsx"),
        row("", r"x: got notes\.txt, expected a table .* or a directory with train\.csv", "x/notes.txt"),
        row(HEAD + GOOD, "got dev, expected a split train", "x/dev.csv"),
        row(HEAD + SAME, r"got \d+ examples to train on, and \d+ distinct targets held out, expected 5 and 3"),
        row(HEAD + "a,0.5\nb,1.5\nc,2.5\n", r"got \d examples to train on, and \d distinct .* equal texts"),
        row(HEAD, r"expected 3 files for train, .*\. Compare train-00001-of", "x/train-00000-of-00003.csv"),
        row(HEAD + GOOD + f"a,{'long' * 2000}\n", "got a class of 8,000 characters, expected 1 to 4,096"),
        row(HEAD + "a,0\nb,1\nc,2\n" * 9, "two names or more that differ, of 1 to", labels=("a", "", "c")),
        row('{"_data_files": []}', "x: got no rows, expected one at least", "x/state.json"),
    ],
)
def test_malformed_data(name, content, choices, message, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises((DataError, UsageError), match=message):
        describe(tmp_path / Path(name).parts[0], None, ColumnChoices(**choices))


def test_texts_and_images_of_two_classes_have_the_same_metrics(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for number in range(40):
        folder = tmp_path / "pets" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
    texts = write_rows(tmp_path / "x.csv", ("text", "label"), ROWS)
    metrics = {own_task(describe(path, None, ColumnChoices())).metrics for path in (tmp_path / "pets", texts)}
    assert metrics == {("accuracy", "macro_f1", "matthews")}


def test_malformed_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    path.write_bytes((MADE / "reviews.parquet").read_bytes()[:-9])
    table = parquet.read_table(MADE / "reviews.parquet")
    nameless = '{"info": {"features": {"label": {"_type": "ClassLabel"}}}}'
    for name, metadata in (("y", "{"), ("z", nameless)):
        parquet.write_table(table.replace_schema_metadata({"huggingface": metadata}), tmp_path / f"{name}.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    latin = pyarrow.StringArray.from_buffers(1, *pyarrow.array([b"caf\xe9"], pyarrow.binary()).buffers()[1:])
    parquet.write_table(pyarrow.table({"text": latin, "label": ["good"]}), tmp_path / "w.parquet")
    with pytest.raises(DataError, match=r"w\.parquet column text: got .*utf-8.*, expected UTF-8"):
        describe(tmp_path / "w.parquet", None, ColumnChoices())
    (tmp_path / "w.parquet").unlink()
    for malformed in sorted(tmp_path.iterdir()):
        with pytest.raises(DataError, match=rf"{malformed.name}: got .* expected a file \.parquet"):
            describe(malformed, None, ColumnChoices())


def test_labels_in_columns_of_arrow(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    for labels, message in (
        ([0.0, 1.0, float("nan")], "row 3 column label: got an empty cell, expected a label"),
        ([0.0, 1.0, float("inf")], "row 3 column label: got inf, expected a finite number"),
        (["good", "NaN", "bad"], "row 2 column label: got 'NaN', expected a label"),
    ):
        parquet.write_table(pyarrow.table({"text": ["a", "b", "c"], "label": labels}), path)
        with pytest.raises(DataError, match=message):
            describe(path, None, ColumnChoices())
    # A class that a data set declares may be called nan.
    names = {"info": {"features": {"label": {"_type": "ClassLabel", "names": ["eng", "nan"]}}}}
    table = pyarrow.table({"text": [f"text {number}" for number in range(40)], "label": [0, 1] * 20})
    parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(names)}), path)
    assert describe(path, None, ColumnChoices()).labels == ("eng", "nan")
    table = table.set_column(1, "label", [[0, 1] * 19 + [0, 2]])
    parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(names)}), path)
    with pytest.raises(DataError, match=r"row 40 .*: got 2, expected the number of a class, 0 to 1\. Correct it"):
        describe(path, None, ColumnChoices())


@pytest.mark.parametrize(
    ("labels", "choices"),
    [
        (("bad", "good"), {"labels": ("good", "bad")}),
        (("bad, or dull", "good"), {}),
        (("0", "1"), {"labels": ("bad", "good")}),
        (("0", "1"), {"regression": False}),
        (("0.5", "1", "2.5"), {}),
    ],
)
def test_the_command_that_restores_a_reduced_run_reads_the_same_data(labels, choices, tmp_path):
    rows = [{"text": f"text {number}", "kind": labels[number % len(labels)]} for number in range(80)]
    (tmp_path / "x.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data, _ = read(tmp_path / "x.jsonl", ("text",), "kind", **choices)
    config = RunConfig("x", {}, provenance(trainer="x", data="x", seed=0), own_data=data)
    program, command, *options = shlex.split(restoring_command(config, tmp_path, model=tmp_path, teacher=tmp_path))
    assert (program, command) == ("fewheads", "finetune")
    given = finetune.make_context(command, options).params
    names = tuple(given["labels"].split(",")) if given["labels"] else ()
    again = ColumnChoices(tuple(given["texts"]), given["label"], names, given["regression"])
    assert describe(given["data"], given["dev"], again) == data


def test_dev_with_other_labels_or_none_and_files_of_one_split_in_two_formats(tmp_path):
    train, dev = write_rows(tmp_path / "train.csv", ("text", "label"), ROWS), tmp_path / "dev.csv"
    for content, message in (
        ("text,label\na,good\nb,awful\n", r"dev\.csv line 3 .* got 'awful', expected one of the 2 .*: bad, good\. "),
        ("text,lable\na,good\n", r"dev\.csv: got the columns text, lable, expected the label column label, .* called"),
        ("text,label\na,\n", r"dev\.csv: got none, expected labels in the column label"),
        ("words,label\na,good\n", r"dev\.csv --text: got no column text, .*training set.* columns words, label"),
    ):
        dev.write_text(content)
        with pytest.raises(DataError, match=message):
            describe(train, dev, ColumnChoices())
    write_rows(dev, ("text", "lable"), ROWS)
    with pytest.raises(DataError, match=r"dev\.csv: got the columns text, lable, expected the label column label"):
        describe(tmp_path, None, ColumnChoices())
    dev.rename(tmp_path / "test.csv")
    assert describe(tmp_path, None, ColumnChoices()).files[-1].split == ""
    with pytest.raises(DataError, match=r"missing\.csv: got nothing there, .* Give another --dev"):
        describe(train, tmp_path / "missing.csv", ColumnChoices())
    shutil.copy(train, tmp_path / "train.tsv")
    with pytest.raises(DataError, match=r"got train\.csv and train\.tsv, expected one file for train"):
        describe(tmp_path, None, ColumnChoices())


def test_data_are_found_where_they_were_or_below_data_dir_and_must_not_change(tmp_path):
    path = write_rows(tmp_path / "here" / "reviews.csv", ("text", "label"), ROWS)
    task = own_task(describe(path, None, ColumnChoices()))
    before = task.examples("nowhere")
    moved = shutil.move(path.parent, tmp_path / "there")
    with pytest.raises(DataError, match=r"reviews\.csv: got nothing there, .*give --data-dir with the directory"):
        task.examples("nowhere")
    assert task.examples(moved).train.texts == before.train.texts
    with open(Path(moved) / "reviews.csv", "a") as file:
        file.write("new,good\n")
    with pytest.raises(
        DataError, match=r"there/reviews\.csv file .*: got 41 rows with SHA-256 .*, expected 40 rows with"
    ):
        task.examples(moved)


def test_a_saved_split_cannot_take_the_place_of_the_holdout(tmp_path):
    pytest.importorskip("pyarrow")
    shutil.copytree(MADE / "saved", tmp_path / "saved")
    shutil.copytree(MADE / "saved" / "validation", tmp_path / "saved" / "holdout")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "holdout"]}')
    with pytest.raises(DataError, match=r"saved: got a split holdout, expected splits of other names\. Call it dev or"):
        describe(tmp_path / "saved", None, ColumnChoices())


def test_a_name_is_that_of_no_other_task():
    assert OwnData(path="/data/SST-2").name == "SST-2/"
    assert OwnData(path="/data/digits.csv").name == "digits.csv"
