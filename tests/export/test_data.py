"""Files of tasks and of evaluation sets, their hold-outs, and rows of tokens."""

import msgspec
import numpy as np
import pytest

from export.data.evaluation import evaluation_texts, held_out_passages, pair_sets, question_sets, read_passages
from export.data.examples import Examples, held_out, limited, split_holdout
from export.data.holdouts import held_phrases, held_sources, held_texts
from export.data.tokens import encode, load_tokenizer, shuffled_batches, sorted_batches
from export.errors import CheckpointError, DataError
from export.finetune import NAMES, run
from export.finetune.text_tasks import TASKS
from tests.support.evaluation_data import write_evaluation_sets
from tests.support.task_data import make_tokenizer, real

#: Items of the real files, and for dev also of each class, in the order of the labels.
SIZES = {
    ("SST-2", "train"): (67_349,),
    ("CoLA", "dev"): (1_043, 322, 721),
    ("STS-B", "dev"): (1_500,),
    ("QNLI", "dev"): (5_463, 2_702, 2_761),
}


def write(root, task, text, split="train"):
    folder = root / "glue" / task
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{split}.tsv").write_bytes(text.encode(errors="surrogateescape"))


@pytest.mark.parametrize(("name", "split"), SIZES)
def test_items_and_classes_of_the_real_files(name, split):
    examples = TASKS[name].read(real("glue", name, f"{split}.tsv").parents[2], split)
    number, *classes = SIZES[name, split]
    assert len(examples.texts) == number
    assert all(text for texts in examples.texts for text in texts)
    if classes:
        assert np.bincount(examples.targets).tolist() == classes
    if name == "STS-B":
        assert (examples.targets.dtype, examples.targets.min(), examples.targets.max()) == (np.float32, 0, 5)


#: Rows held out of the real files in version 1, and of these the share with a text that is learnt, alone or within
#: another one; and the rows held out in version 2.
LEARNT = {
    "STS-B": (569, 0.1705, 575),
    "RTE": (251, 0.1554, 249),
    "MRPC": (367, 0.139, 367),
    "WNLI": (58, 0.0862, 64),
    "SST-2": (6748, 0.8852, 6365),
}


def parts_of(text):
    words = text.split()
    return {" ".join(words[first:last]) for first in range(len(words)) for last in range(first + 1, len(words) + 1)}


@pytest.mark.parametrize("name", ["STS-B", "RTE", "MRPC", "WNLI", pytest.param("SST-2", marks=pytest.mark.slow)])
def test_texts_of_the_real_hold_outs_are_not_learnt_in_version_2(name):
    found = []
    for split in (1, 2):
        train, holdout, _ = msgspec.structs.replace(TASKS[name], split=split).examples(real("glue", name).parents[1])
        learnt = {text for row in train.texts for text in row}
        if name == "SST-2":
            learnt = set().union(*map(parts_of, learnt))
        found += [len(holdout.texts), np.mean([any(text in learnt for text in row) for row in holdout.texts])]
    held, share, stricter = LEARNT[name]
    assert found == [held, pytest.approx(share, abs=1e-4), stricter, 0]


MRPC = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"


@pytest.mark.parametrize(
    ("task", "text", "texts", "targets"),
    [  # without a header; with a byte order mark, quotes and odd line ends; columns in another order; a short row
        ("CoLA", "gj04\t1\t\tHe left.\ngj04\t0\t*\tHim left.", (("He left.",), ("Him left.",)), [1, 0]),
        ("MRPC", f'{MRPC}1\t7\t8\t" We\u2028so .\tHe " said .\r\n\n', (('" We\u2028so .', 'He " said .'),), [1]),
        ("STS-B", "index\tscore\tsentence2\tsentence1\n0\t2.5\tb\ta\n", (("a", "b"),), [2.5]),
        ("QQP", f"{QQP}1\t2\t3\twhy?\n4\t5\t6\twhy?\twho?\t0\n", (("why?", "who?"),), [0]),
    ],
)
def test_odd_files_of_glue(task, text, texts, targets, tmp_path):
    write(tmp_path, task, text)
    examples = TASKS[task].read(tmp_path, "train")
    assert (examples.texts, examples.targets.tolist()) == (texts, targets)
    for split, label in (("dev_matched", "neutral"), ("dev_mismatched", "contradiction")):
        write(tmp_path, "MNLI", f"sentence1\tsentence2\tgold_label\na\tb\t{label}\n", split)
    assert [TASKS["MNLI"].read(tmp_path, split).targets[0] for split in TASKS["MNLI"].dev] == [1, 2]


SCORED = "sentence1\tsentence2\tscore\na\tb\t"


@pytest.mark.parametrize(
    ("task", "text", "message"),
    [
        ("SST-2", "sentence\tlabel\nfine\t2\n", "line 2: got '2', expected label one of 0, 1"),
        ("SST-2", "sentence\tlabel\nfine\t1\nfine\n", "line 3: got 1 cells, expected 2, as in the heading"),
        ("SST-2", "text\tlabel\nfine\t1\n", "line 1: got text, label, expected a header with sentence, label"),
        ("SST-2", "sentence\tlabel\n", "train.tsv: got no rows"),
        ("SST-2", None, "No such file"),
        ("SST-2", "\udcff", "expected UTF-8"),
        *(("STS-B", SCORED + score, "score from 0 to 5") for score in ("nan", "5.1", "-1", "x")),
    ],
)
def test_malformed_files(task, text, message, tmp_path):
    if text is not None:
        write(tmp_path, task, text)
    with pytest.raises(DataError, match=r"gluebenchmark\.com") as raised:
        TASKS[task].read(tmp_path, "train")
    assert message in str(raised.value)


def test_names_are_the_tasks_and_labels_have_names():
    assert tuple(run.TASKS) == NAMES
    for name, task in run.TASKS.items():
        assert (task.name, task.headline in task.metrics) == (name, True)
    for task in TASKS.values():
        names = task.class_names
        assert (len(names), {"0", "1"} & set(names)) == (len(task.labels), set()), task.name


def test_holdout_is_a_fixed_partition_that_keeps_first_texts_together():
    texts = tuple((f"premise {index // 2}", f"hypothesis {index}") for index in range(400))
    examples = Examples(texts, np.arange(400))
    train, holdout = split_holdout(examples)
    assert (len(holdout.texts), sorted([*train.targets, *holdout.targets])) == (40, list(range(400)))
    assert not {one for one, _ in train.texts} & {one for one, _ in holdout.texts}
    assert holdout.targets[:4].tolist() == split_holdout(examples)[1].targets[:4].tolist()


#: Words of a sentence, each the same in so many that follow each other.
WORDS = {"the": 400, "film": 20, "is": 1, "fine": 1}


def test_phrases_are_held_out_with_every_sentence_that_they_stand_in():
    sentences = [" ".join(f"{word}{number // spread}" for word, spread in WORDS.items()) for number in range(400)]
    phrases = [" ".join(text.split()[first:last]) for text in sentences for first in (0, 2) for last in (3, 4)]
    texts = [*sentences, *phrases]
    held = held_phrases(texts)
    learnt = [f" {text} " for text, out in zip(texts, held, strict=True) if not out]
    inside = [text for text, out in zip(texts, held, strict=True) if out and any(f" {text} " in one for one in learnt)]
    assert (held[:400].sum(), inside) == (40, [])
    out = set(np.flatnonzero(held[:400]).tolist())
    for text, found in zip(texts, held.tolist(), strict=True):
        assert found == ({number for number in range(400) if f" {text} " in f" {sentences[number]} "} <= out)
    assert held[400:].sum() > 40


def test_rows_that_share_either_text_are_held_out_together_unless_all_hang_together():
    pairs = [(f"a {number // 3}", f"b {number // 2}") for number in range(600) if number % 12]  # chains of 11 rows
    held = held_texts(pairs)
    learnt = {text for row, out in zip(pairs, held, strict=True) if not out for text in row}
    assert 0.08 < held.mean() <= 0.1
    assert not learnt & {text for row, out in zip(pairs, held, strict=True) if out for text in row}
    whole = [(f"question {number // 4}", f"text {number % 7}") for number in range(400)]
    assert held_texts(whole).tolist() == held_out([one for one, _ in whole], 0.1).tolist()
    assert held_texts([("same",)] * 9).all()


def test_half_of_the_rows_held_out_by_source_are_of_sources_that_are_not_learnt():
    sources = [f"book {int(number**0.5)}" for number in range(1000)]
    held = held_sources(sources, [f"sentence {number}" for number in range(1000)])
    learnt = {source for source, out in zip(sources, held, strict=True) if not out}
    other = sum(source not in learnt for source, out in zip(sources, held, strict=True) if out)
    assert held.sum() in range(100, 103)
    assert 40 < other <= 50
    assert held_sources(["book"], ["the only sentence"]).tolist() == [True]  # and no row is left


def test_limited_draws_the_same_examples_and_fewer_are_part_of_more():
    examples = Examples(tuple((f"text {index}",) for index in range(100)), np.arange(100))
    ten, twenty = limited(examples, 10), limited(examples, 20)
    assert len(ten.texts) == 10
    assert set(ten.targets) < set(twenty.targets)
    assert ten.targets.tolist() != list(range(10))
    assert limited(examples, None) is limited(examples, 100) is examples


PAIR = ("good film", "the plot was bad")


def test_pairs_have_segments_and_batches_are_padded_to_their_longest():
    rows = encode(make_tokenizer(), Examples((PAIR, ("cat", "mat")), np.array([1, 0])), 64)
    assert rows.lengths.tolist() == [9, 5]
    batch = rows.batch(np.array([1, 0]))
    assert (batch.inputs.shape, batch.mask.tolist()[0]) == ((2, 9), [1, 1, 1, 1, 1, 0, 0, 0, 0])
    assert (batch.segments.tolist()[1], batch.inputs[0, 5:].tolist()) == ([0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0])
    assert batch.targets.tolist() == [0, 1]
    single = encode(make_tokenizer(), Examples((("good film",),), np.array([1])), 64)
    assert single.tokens[0].tolist()[0] == 2  # [CLS]
    assert single.segments[0].tolist() == [0, 0, 0, 0]


def test_truncation_cuts_the_longer_text_and_leaves_no_trace_in_the_tokenizer():
    tokenizer = make_tokenizer()
    assert encode(tokenizer, Examples((PAIR,), np.array([1])), 7).segments[0].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert tokenizer.truncation is None


def test_sorted_batches_are_longest_first():
    assert [batch.tolist() for batch in sorted_batches(np.array([3, 9, 5, 9]), 3)] == [[1, 3, 2], [0]]


def test_shuffled_batches_are_deterministic_and_short_of_padding():
    lengths = np.random.default_rng(0).integers(5, 100, 2000)
    batches = shuffled_batches(lengths, 32, seed=0, epoch=0)
    assert sorted(np.concatenate(batches)) == list(range(2000))
    again = shuffled_batches(lengths, 32, seed=0, epoch=0)
    assert all(np.array_equal(one, other) for one, other in zip(batches, again, strict=True))
    for other in (shuffled_batches(lengths, 32, seed=0, epoch=1), shuffled_batches(lengths, 32, seed=1, epoch=0)):
        assert not np.array_equal(np.concatenate(batches), np.concatenate(other))
    assert sum(len(batch) * lengths[batch].max() for batch in batches) < 1.1 * lengths.sum()
    # Long and short batches take turns.
    firsts = [lengths[batch].mean() for batch in batches[:20]]
    assert min(firsts) < 30
    assert max(firsts) > 70


def test_load_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match="nothing there"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="expected a tokenizer"):
        load_tokenizer(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.enable_padding()
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.padding, loaded.truncation) == (None, None)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return write_evaluation_sets(tmp_path_factory.mktemp("sets"))


def test_a_year_is_one_set_of_its_scored_pairs(data_dir):
    sets = {name: read() for name, read in pair_sets(data_dir).items()}
    sizes = {"STS14": 31, "STS15": 30, "STS-B dev": 25, "SICK test": 30}
    assert {name: len(found.texts) for name, found in sets.items()} == sizes
    assert sets["STS14"].texts[0] == ('"the cat', "the cat")
    assert sets["STS14"].targets[:3].tolist() == [5, 2, 3]
    assert sets["SICK test"].texts[10:20] == sets["STS14"].texts[1:11]


def test_questions_are_answered_by_a_document(data_dir):
    qnli, xquad = (read() for read in question_sets(data_dir).values())
    assert (len(qnli.questions), len(qnli.documents)) == (40, 60)
    assert all(
        f"is the {qnli.documents[row]}" == asked for asked, row in zip(qnli.questions, qnli.answers, strict=True)
    )
    assert (len(xquad.questions), len(xquad.documents)) == (20, 20)


def test_evaluation_texts_have_all_sets_and_sentences_of_paragraphs(data_dir, tmp_path):
    texts = evaluation_texts(data_dir)
    qnli, xquad = (read() for read in question_sets(data_dir).values())
    assert {"the hidden test .", '"the cat', "the cat", *qnli.questions, *xquad.documents} <= texts
    assert set(qnli.documents) <= texts
    assert f"{xquad.documents[0].partition('.')[0]}." in texts
    with pytest.raises(DataError, match=r"sets in .*: got none of their files, expected sts/YEAR.*dataset-sts.*xquad"):
        evaluation_texts(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("sts/2013.FNWN.test.tsv", "5.5\ta\tb\n", r"FNWN\.test\.tsv line 1: got '5\.5', expected score from 0 to 5"),
        ("sts/2013.FNWN.test.tsv", "5\ta\n", r"line 1: got 2 cells, expected 3"),
        ("sts/SICK.test.txt", "pair_ID\tA\tB\n1\ta\tb\n", r"line 1: got pair_ID, A, B, expected a header with related"),
    ],
)
def test_malformed_evaluation_sets(name, text, message, tmp_path):
    (tmp_path / "sts").mkdir()
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        evaluation_texts(tmp_path)


def test_documents_are_among_what_a_training_on_the_same_file_holds_out(data_dir, tmp_path):
    lines = (data_dir / "passages.txt").read_text().splitlines()
    mask = held_out_passages(lines, 30)
    drawn = {line for line, out in zip(lines, mask, strict=True) if out}
    assert len(drawn) == 30
    shuffled = ["", *(f" {lines[row]}\n" for row in np.random.default_rng(0).permutation(len(lines)))]
    assert {line.strip() for line, out in zip(shuffled, held_out_passages(shuffled, 30), strict=True) if out} == drawn
    distinct = tuple(dict.fromkeys(lines))
    _, holdout = split_holdout(Examples(tuple((line,) for line in distinct), np.zeros(len(distinct))))
    most = {line for line, out in zip(lines, held_out_passages(lines, 10**6), strict=True) if out}
    assert most < {text for (text,) in holdout.texts}
    assert drawn < most
    (tmp_path / "passages.txt").write_text("\n".join(lines))
    found = read_passages(tmp_path / "passages.txt", 10**6, [max(most)])
    assert (len(found.texts), found.left_out) == (len(most) - 1, 1)
    (tmp_path / "passages.txt").write_text("\n".join(lines[:1900]))
    with pytest.raises(
        DataError, match=r"--documents .*txt: got \d\d documents, drawn from 1900 texts, expected 100 at"
    ):
        read_passages(tmp_path / "passages.txt", 10**6, [])


@pytest.mark.slow
def test_real_sets_are_complete():
    data_dir = real("sts", "2015.images.test.tsv").parents[1]
    sizes = {name: len(read().texts) for name, read in pair_sets(data_dir).items()}
    assert {name: sizes[name] for name in ("STS13", "STS14", "STS15")} == {"STS13": 1500, "STS14": 3750, "STS15": 3000}
