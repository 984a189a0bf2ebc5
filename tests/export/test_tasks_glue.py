from collections import Counter

import numpy as np
import pytest

from export.errors import DataError
from export.tasks import NAMES, registry
from export.tasks.examples import Examples, limited, split_holdout
from export.tasks.glue import TASKS, read
from tests.support.task_data import real

SIZES = {
    ("SST-2", "train"): 67_349,
    ("SST-2", "dev"): 872,
    ("CoLA", "train"): 8_551,
    ("CoLA", "dev"): 1_043,
    ("STS-B", "train"): 5_749,
    ("STS-B", "dev"): 1_500,
    ("MRPC", "train"): (3_667, 3_668),  # some copies lack one
    ("MRPC", "dev"): 408,
    ("RTE", "train"): 2_490,
    ("RTE", "dev"): 277,
    ("WNLI", "train"): 635,
    ("WNLI", "dev"): 71,
    ("QNLI", "dev"): 5_463,
}
#: Of each class, in the order of the labels.
DEV_CLASSES = {
    "SST-2": (428, 444),
    "CoLA": (322, 721),
    "MRPC": (129, 279),
    "RTE": (146, 131),
    "WNLI": (40, 31),
    "QNLI": (2_702, 2_761),
}


def write(root, task, text, split="train"):
    folder = root / "glue" / task
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{split}.tsv").write_bytes(text.encode())


def test_names_are_the_tasks():
    assert tuple(registry.TASKS) == NAMES
    assert all(task.headline in task.metrics for task in registry.TASKS.values())
    assert all(task.name == name for name, task in registry.TASKS.items())


@pytest.mark.parametrize(("name", "split"), SIZES)
def test_size_of_the_real_files(name, split):
    root = real("glue", name, f"{split}.tsv").parents[2]
    examples = read(TASKS[name], root, split)
    assert len(examples.texts) in np.atleast_1d(SIZES[name, split])
    assert all(text for texts in examples.texts for text in texts)


@pytest.mark.parametrize("name", DEV_CLASSES)
def test_classes_of_the_real_files(name):
    root = real("glue", name, "dev.tsv").parents[2]
    counts = Counter(read(TASKS[name], root, "dev").targets.tolist())
    assert tuple(counts[label] for label in sorted(counts)) == DEV_CLASSES[name]


def test_scores_of_the_real_files():
    root = real("glue", "STS-B", "train.tsv").parents[2]
    targets = read(TASKS["STS-B"], root, "train").targets
    assert targets.dtype == np.float32
    assert (targets.min(), targets.max()) == (0, 5)


def test_cola_has_no_header(tmp_path):
    write(tmp_path, "CoLA", "gj04\t1\t\tHe left.\ngj04\t0\t*\tHim left.")
    examples = read(TASKS["CoLA"], tmp_path, "train")
    assert examples.texts == (("He left.",), ("Him left.",))
    assert examples.targets.tolist() == [1, 0]


def test_quotes_byte_order_mark_and_odd_line_ends_are_text(tmp_path):
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    write(tmp_path, "MRPC", f'{header}1\t7\t8\t" We said\u2028so .\tHe " said so .\r\n\n')
    examples = read(TASKS["MRPC"], tmp_path, "train")
    assert examples.texts == (('" We said\u2028so .', 'He " said so .'),)


def test_columns_are_found_by_name(tmp_path):
    write(tmp_path, "STS-B", "index\tscore\tsentence2\tsentence1\n0\t2.5\tb\ta\n")
    examples = read(TASKS["STS-B"], tmp_path, "train")
    assert examples.texts == (("a", "b"),)
    assert examples.targets.tolist() == [2.5]


def test_mnli_has_two_dev_sets(tmp_path):
    for split, label in (("dev_matched", "neutral"), ("dev_mismatched", "contradiction")):
        write(tmp_path, "MNLI", f"sentence1\tsentence2\tgold_label\na\tb\t{label}\n", split)
    assert [read(TASKS["MNLI"], tmp_path, split).targets[0] for split in TASKS["MNLI"].dev] == [1, 2]


def test_short_rows_of_qqp_are_left_out(tmp_path):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    write(tmp_path, "QQP", f"{header}1\t2\t3\twhy?\n4\t5\t6\twhy?\twho?\t0\n")
    assert read(TASKS["QQP"], tmp_path, "train").texts == (("why?", "who?"),)


@pytest.mark.parametrize(
    ("text", "subject"),
    [
        ("sentence\tlabel\nfine\t2\n", "line 2: got '2', expected label one of 0, 1"),
        ("sentence\tlabel\nfine\t1\nfine\n", "line 3: got 1 columns, expected 2 columns"),
        ("text\tlabel\nfine\t1\n", "line 1: got text, label, expected a header with sentence, label"),
        ("sentence\tlabel\n", "train.tsv: got no examples"),
    ],
)
def test_malformed_file(text, subject, tmp_path):
    write(tmp_path, "SST-2", text)
    with pytest.raises(DataError, match=r"gluebenchmark\.com") as raised:
        read(TASKS["SST-2"], tmp_path, "train")
    assert subject in str(raised.value)


@pytest.mark.parametrize("score", ["nan", "5.1", "-1", "x"])
def test_malformed_score(score, tmp_path):
    write(tmp_path, "STS-B", f"sentence1\tsentence2\tscore\na\tb\t{score}\n")
    with pytest.raises(DataError, match="score from 0 to 5"):
        read(TASKS["STS-B"], tmp_path, "train")


def test_absent_and_undecodable_files(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read(TASKS["RTE"], tmp_path, "train")
    write(tmp_path, "RTE", "")
    with pytest.raises(DataError, match="a header with"):
        read(TASKS["RTE"], tmp_path, "train")
    (tmp_path / "glue" / "RTE" / "train.tsv").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="expected UTF-8"):
        read(TASKS["RTE"], tmp_path, "train")


def test_holdout_is_a_fixed_partition_that_keeps_first_texts_together():
    texts = tuple((f"premise {index // 2}", f"hypothesis {index}") for index in range(400))
    examples = Examples(texts, np.arange(400))
    train, holdout = split_holdout(examples)
    assert len(holdout.texts) == 40
    assert sorted([*train.targets, *holdout.targets]) == list(range(400))
    assert not {one for one, _ in train.texts} & {one for one, _ in holdout.texts}
    assert holdout.targets[:4].tolist() == split_holdout(examples)[1].targets[:4].tolist()
    assert holdout.targets.tolist() != split_holdout(examples, seed=1)[1].targets.tolist()
    assert len(split_holdout(examples, share=0.25)[1].texts) == 100


def test_limited_draws_the_same_examples_and_fewer_are_part_of_more():
    examples = Examples(tuple((f"text {index}",) for index in range(100)), np.arange(100))
    ten, twenty = limited(examples, 10), limited(examples, 20)
    assert len(ten.texts) == 10
    assert set(ten.targets) < set(twenty.targets)
    assert ten.targets.tolist() != list(range(10))
    assert limited(examples, None) is limited(examples, 100) is examples
