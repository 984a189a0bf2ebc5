"""The sets on which embeddings are evaluated, in their official formats."""

import numpy as np
import pytest

from export.data.evaluation import evaluation_texts, held_out_passages, pair_sets, question_sets
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
    further = qnli.among(["a new one", qnli.documents[3], "a new one"])
    assert further.documents == (*qnli.documents, "a new one")


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


def test_passages_are_held_out_by_their_text_alone():
    lines = [f"passage {number}" for number in range(50)]
    mask = held_out_passages(lines, 10)
    assert mask.sum() == 10
    shuffled = [f" {lines[row]}\n" for row in np.random.default_rng(0).permutation(50)]
    again = held_out_passages(["", *shuffled, shuffled[0]], 10)
    chosen = {line.strip() for line, held in zip(["", *shuffled, shuffled[0]], again, strict=True) if held}
    assert chosen == {line for line, held in zip(lines, mask, strict=True) if held}
    assert again[-1] == again[1]
    assert held_out_passages(lines, 99).all()


@pytest.mark.slow
def test_real_sets_are_complete():
    data_dir = real("sts", "2015.images.test.tsv").parents[1]
    sizes = {name: len(read().texts) for name, read in pair_sets(data_dir).items()}
    assert {name: sizes[name] for name in ("STS13", "STS14", "STS15")} == {"STS13": 1500, "STS14": 3750, "STS15": 3000}
