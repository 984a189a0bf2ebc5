"""The sets on which embeddings are evaluated, in their official formats."""

import numpy as np
import pytest

from export.data.evaluation import evaluation_texts, held_out_passages, pair_sets, question_sets, read_passages
from export.data.examples import Examples, split_holdout
from export.errors import DataError
from tests.support.evaluation_data import write_evaluation_sets
from tests.support.task_data import real


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
def test_malformed_files(name, text, message, tmp_path):
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
