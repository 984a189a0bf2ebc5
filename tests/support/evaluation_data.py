"""Small evaluation sets in their official formats, with words of the tests' tokenizer."""

import json

from tests.support.task_data import NEUTRAL, make_sentiment, write_rows, write_sst2

_STSB = ("index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2")
_SICK = ("pair_ID", "sentence_A", "sentence_B", "relatedness_score", "entailment_judgment")


def write_evaluation_sets(root):
    """Write two years of STS, STS-B's dev and test, SICK, QNLI, XQuAD, SST-2 and passages.txt, and return the root."""
    sentences = [text for text, _ in make_sentiment(60, seed=2)]
    # A sentence, and its first words with others behind them: the more it keeps, the higher the score.
    pairs = [
        (number % 6, text, " ".join([*text.split()[: number % 6], *NEUTRAL[number % 9 :][:3]]))
        for number, text in enumerate(sentences)
    ]
    sts = root / "sts"
    write_rows(sts / "2014.images.test.tsv", *_rows(pairs[:20]))
    # A pair that nobody scored, and a quote, which means nothing here.
    write_rows(
        sts / "2014.OnWN.test.tsv", *_rows([("", "no score", "no score"), (5, '"the cat', "the cat "), *pairs[20:30]])
    )
    write_rows(sts / "2015.belief.test.tsv", *_rows(pairs[30:]))
    scored = [(number, "g", "f", "y", number, "n", "n", a, b, score) for number, (score, a, b) in enumerate(pairs[:25])]
    write_rows(root / "glue" / "STS-B" / "dev.tsv", (*_STSB, "score"), scored)
    write_rows(root / "glue" / "STS-B" / "test.tsv", _STSB, [("0", *"gfy0nn", "the hidden test .", "was bad .")])
    sick = [(number, a, b, score, "NEUTRAL\r") for number, (score, a, b) in enumerate(pairs[10:40])]
    write_rows(sts / "SICK.test.txt", _SICK, sick, "\t")
    asked = [(number, f"is the {a}", a, label) for number, a in enumerate(sentences) for label in _LABELS[number % 3]]
    write_rows(root / "glue" / "QNLI" / "dev.tsv", ("index", "question", "sentence", "label"), asked)
    paragraphs = [_paragraph(number, sentences[number], sentences[number + 1]) for number in range(0, 40, 2)]
    (root / "squad").mkdir()
    (root / "squad" / "xquad.en.json").write_text(json.dumps({"data": [{"title": "a", "paragraphs": paragraphs}]}))
    write_sst2(root)
    (root / "passages.txt").write_text("".join(f"{text} .\n" for text, _ in make_sentiment(200, seed=3)))
    return root


_LABELS = (("entailment",), ("not_entailment",), ("entailment",))


def _rows(rows):
    return rows[0], rows[1:]


def _paragraph(number, first, second):
    answers = [{"answer_start": 0, "text": first.split()[0]}]
    entry = {"id": str(number), "question": f"was a {second}", "answers": answers}
    return {"context": f"{first}. {second}.", "qas": [entry]}
