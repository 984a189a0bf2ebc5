"""Trained heads and biases as bundles: requests swap them on one base."""

import pytest

from export.cli.language import language
from export.generate.decoding import complete
from export.generate.evaluate import answer_measures, completion_limit
from export.generate.formats import Source, parse_answer
from export.generate.model import Base, positions_of
from export.generate.train import read_corpus
from export.papers.backward.training import load_head
from export.training.runs import read_metrics
from tests.support.sample_requests import column
from tests.support.stock_client import served_bundles
from tests.support.task_data import invoke

#: Answers to a question of two numbers, all of which the base learns, and the options of the training for each.
MODULES = {
    "sum": (lambda a, b: (a + b) % 10, ()),
    "larger": (lambda a, b: "first" if a > b else "second", ("--heads", 2, "--layers", 2)),
    "parity": (lambda a, b: "odd" if (a + b) % 2 else "even", ("--dims", 8)),
    "tens": (lambda a, b: "yes" if a // 10 == b // 10 else "no", ("--bias",)),
}
NUMBERS = [(a, b) for a in range(0, 30, 2) for b in range(1, 30, 3)]
ROWS = 8


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base, a run for each module, and the bundles of all."""
    place = tmp_path_factory.mktemp("heads")
    for name, (answer, _) in MODULES.items():
        (place / f"{name}.txt").write_text("".join(f"{a} and {b}?\n{answer(a, b)}\n" for a, b in NUMBERS))
    data = [part for name in MODULES for part in ("--data", f"mathematics:{place}/{name}.txt")]
    small = ("--size", "tiny", "--tokenizer", "characters", "--steps", 150)
    invoke(language, "train", "base", *data, *small, "--out", place)
    own = ("--repository", place / "models")
    invoke(language, "export", place / "base", "--name", "base", *own)
    for name, (_, shape) in MODULES.items():
        options = ("--data", f"mathematics:{place}/{name}.txt", *shape, "--steps", 100, "--out", place / name)
        invoke(language, "head", place / "base", *options)
        of_base = ("--backbone", place / "base", "--base", place / "models" / "base-1")
        invoke(language, "export-head", place / name, *of_base, "--name", name, *own)
    return place


def texts_of(ask, examples, **parameters):
    """Return what the base of a server writes."""
    found = []
    for start in range(0, len(examples), ROWS):
        sent = {"prompt": column(*(example.text_before for example in examples[start : start + ROWS]))}
        found += [text.decode() for text in ask("base", sent, ["text"], **parameters)["text"][:, 0]]
    return found


@pytest.mark.slow
def test_requests_swap_trained_heads_and_a_bias_on_one_base(place, tmp_path):
    base = Base(place / "base")
    with served_bundles(sorted((place / "models").iterdir()), tmp_path / "cache") as ask:
        for name, (answer, _) in MODULES.items():
            corpus = read_corpus([Source("mathematics", str(place / f"{name}.txt"))], seed=0)
            asked, prompts = corpus.holdout, [example.prompt for example in corpus.holdout]
            limit = completion_limit(corpus.encoded(base.tokenizer, positions_of(base.model))[0])
            texts = texts_of(ask, asked, max_tokens=limit, head=name)
            with base.revised(load_head(place / name, base)) as model:
                assert texts == complete(model, base.tokenizer, prompts, limit)
            given = [parse_answer(text) for text in texts]
            own = {str(answer(a, b))[0] for a, b in NUMBERS}
            assert {text[:1] for text in given} <= own, "no module has a first letter of another"
            measured = answer_measures("holdout", given, [example.answer for example in asked])
            assert {*measured} <= {*read_metrics(place / name).measures}
            plain = complete(base.model, base.tokenizer, prompts, limit)
            for way in ({}, {"head": name, "alpha": 0}):
                assert texts_of(ask, asked, max_tokens=limit, **way) == plain
