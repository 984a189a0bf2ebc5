"""Small evaluation sets in their official formats, with words of the tests' tokenizer, and runs to measure on them."""

import json

import msgspec
import torch

from export.finetune.models import MODEL, Architecture
from export.models.heads import Embedding
from export.training.checkpoint import save
from export.training.provenance import provenance
from export.training.runs import TOKENIZER, RunConfig, RunMetrics
from tests.support.task_data import NEUTRAL, make_sentiment, make_tokenizer, make_transformer, write_rows, write_sst2

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
    (root / "squad").mkdir(parents=True)
    (root / "squad" / "xquad.en.json").write_text(json.dumps({"data": [{"title": "a", "paragraphs": paragraphs}]}))
    write_sst2(root)
    (root / "passages.txt").write_text("".join(f"{text} .\n" for text, _ in make_sentiment(2400, seed=3)))
    return root


_LABELS = (("entailment",), ("not_entailment",), ("entailment",))


def _rows(rows):
    return rows[0], rows[1:]


def _paragraph(number, first, second):
    answers = [{"answer_start": 0, "text": first.split()[0]}]
    entry = {"id": str(number), "question": f"was a {second}", "answers": answers}
    return {"context": f"{first}. {second}.", "qas": [entry]}


def write_embedding_run(directory, seed=0, noise=0.0, dim=32, space=None):
    """Write and return a run of an embedder with random weights, each with ``noise`` times another random number."""
    transformer = make_transformer(layers=1, dim=dim, seed=seed)
    fields = {"task": "sentence-embedding", "labels": (), "max_length": 24, "embedding": Embedding((), True)}
    architecture = Architecture(transformer=transformer.config, **fields)
    model = architecture.create(transformer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn_like(parameter)
    record = provenance(trainer="a test", data="none", seed=seed)
    config = RunConfig(MODEL, msgspec.to_builtins(architecture), record, space=space)
    save(directory, model, config, RunMetrics(1, 0, 0, 0.0, ()), {TOKENIZER: make_tokenizer().to_str().encode()})
    return directory
