"""Restoration of reduced encoders on plain text."""

import json
import lzma
import math
import shutil
import sys
import weakref
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from edge.bundles.bundle import Bundle
from edge.errors import UsageError
from export.cli.export import export
from export.cli.reduce import reduce
from export.data.evaluation import has_evaluated
from export.data.examples import Examples, split_holdout
from export.data.tokens import load_tokenizer
from export.errors import CheckpointError, DataError
from export.finetune.models import open_model
from export.importing.run import import_run
from export.models.heads import Embedding, SentenceEmbedder, SequenceClassifier, SpanClassifier, TokenClassifier
from export.models.transformer import LayerShape
from export.reduce.plan import plan_of
from export.reduce.reduce import apply_plan
from export.reduce.restore import (
    RestorationObjective,
    RestorationRecipe,
    Texts,
    imitated_layers,
    read_restoration_texts,
    restore,
)
from export.training.log import RunFiles
from export.training.runs import CONFIG, read_config
from tests.support.imported_directories import with_tokenizer, write_embedder
from tests.support.sample_requests import column
from tests.support.stock_client import served_bundles
from tests.support.task_data import Seen, encoded, invoke, make_sentiment, make_transformer, same, write_rows

RECIPE = RestorationRecipe(epochs=3, passes=6, batch_size=32, peak_learning_rate=5e-3)
BOARD = ("--for", "orin-nano-super:15W", "--tokens", 16)


@pytest.fixture(scope="module")
def texts():
    return Texts(encoded(make_sentiment(320)), encoded(make_sentiment(64, seed=1)), Examples((), np.empty(0)))


def embedder(layers=3):
    torch.manual_seed(3)
    return SentenceEmbedder(make_transformer(layers=layers), "mean", Embedding((), True)).eval()


def without(model, texts, *numbers, heads=2):
    """Return a model without some layers, and with fewer heads in the others."""
    dense = model.transformer.config.layers[0]
    shape = LayerShape(heads, dense.head_dim, dense.ffn_dim)
    shapes = [None if number in numbers else shape for number in range(len(model.transformer.layers))]
    return apply_plan(model, texts.train, plan_of(model.transformer.config, shapes))


HEADS = {
    "embedding": lambda body: SentenceEmbedder(body, "mean", Embedding((), True)),
    "not normalised": lambda body: SentenceEmbedder(body, "mean", Embedding()),
    "classes": lambda body: SequenceClassifier(body, labels=3),
    "regression": lambda body: SequenceClassifier(body, labels=1, regression=True),
    "labels of tokens": lambda body: TokenClassifier(body, 3),
    "span": SpanClassifier,
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_reduced_model_answers_more_like_the_original(texts, kind):
    torch.manual_seed(3)
    model = HEADS[kind](make_transformer(layers=3)).eval()
    small = without(model, texts, 1)
    frozen = {name: tensor.clone() for name, tensor in small.model.transformer.embeddings.state_dict().items()}
    trained, closeness = restore(model, {"2x": small}, texts, RECIPE)
    assert closeness["2x"] == pytest.approx(trained.scores[-1], abs=1e-5)
    if kind in ("embedding", "not normalised"):
        assert 0.9 < closeness["2x"] <= 1
    else:
        assert -0.05 < closeness["2x"] < 0
    assert trained.scores[-1] > trained.scores[0]
    assert same(small.model.transformer.embeddings, frozen)
    assert not small.model.training


def test_students_learn_the_same_beside_others(texts):
    model = embedder()
    alone = without(model, texts, 1)
    both = {"other": without(model, texts, 0, 1), "this": without(model, texts, 1)}
    restore(model, {"this": alone}, texts, RECIPE)
    restore(model, both, texts, RECIPE)
    for ours, theirs in zip(alone.model.parameters(), both["this"].model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_family_takes_the_memory_of_one_student_at_a_time(texts):
    model, kept, alive = embedder(), [], []
    first, second = (without(model, texts, 1) for _ in range(2))
    first.model.transformer.layers[0].register_forward_hook(lambda *_: kept.append(weakref.ref(_[2])))
    second.model.register_forward_pre_hook(lambda *_: alive.append([one() is not None for one in kept]))
    restore(model, {"first": first, "second": second}, texts, msgspec.structs.replace(RECIPE, epochs=1, passes=0.1))
    assert alive[0] == [False]
    assert not any(map(any, alive))


def test_an_interrupted_restoration_ends_with_the_same_bits(texts, tmp_path):
    model, files = embedder(), RunFiles(tmp_path / "small")
    whole, resumed = without(model, texts, 1), without(model, texts, 1)
    restore(model, {"2x": whole}, texts, RECIPE)
    with pytest.raises(KeyboardInterrupt):
        restore(model, {"2x": without(model, texts, 1)}, texts, RECIPE, files=files, observer=Seen(stop=45))
    seen = Seen()
    trained, closeness = restore(model, {"2x": resumed}, texts, RECIPE, files=files, observer=seen)
    assert seen.resumed == [(40, 60)]  # the end of the second of three epochs
    assert trained.steps == 60
    assert same(whole.model, resumed.model)
    assert restore(model, {"2x": without(model, texts, 1)}, texts, RECIPE, files=files).closeness == closeness


def test_students_keep_the_last_epoch_and_are_measured_once_in_each(texts, monkeypatch):
    """By a rate that grows until the students are worse than before."""
    measured, measure = [], RestorationObjective.closeness
    monkeypatch.setattr(RestorationObjective, "closeness", lambda self: measured.append(measure(self)) or measured[-1])
    model, students = embedder(), {name: without(embedder(), texts, 1) for name in ("this", "other")}
    recipe = msgspec.structs.replace(RECIPE, peak_learning_rate=2.0, warmup_share=0.99)
    trained, closeness = restore(model, students, texts, recipe)
    assert trained.scores[-1] < max(trained.scores)
    assert trained.best_epoch == len(measured) == 3
    assert closeness == measured[-1]


@pytest.mark.parametrize("loss", ["output", "hidden", "similarity"])
def test_each_loss_alone_brings_a_model_nearer(texts, loss):
    model = embedder()
    small = without(model, texts, 1, heads=1)
    weights = dict.fromkeys(("output", "hidden", "similarity"), 0.0) | {loss: 1.0}
    trained, _ = restore(model, {"2x": small}, texts, msgspec.structs.replace(RECIPE, **weights))
    assert trained.losses[-1] < 0.8 * trained.losses[0]


def test_each_layer_imitates_the_state_before_the_next_one(texts):
    model = embedder(layers=6)
    assert imitated_layers(without(model, texts, 1, 3, 4).plan.kept, 6) == (1, 4, 5)
    assert imitated_layers(without(model, texts, 5).plan.kept, 6) == (0, 1, 2, 3, 5)


EVALUATED = [f"the evaluated film number {number} was good" for number in range(60)]
LEAVE_OUT = ("--leave-out-evaluated", "--data-dir")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """An imported embedder of four layers, and texts with sentences of an evaluation set."""
    root = tmp_path_factory.mktemp("restoration")
    with_tokenizer(write_embedder(root / "directory", layers=4))
    import_run(root / "directory", root / "run", max_length=24)
    lines = dict.fromkeys(text for text, _ in make_sentiment(500))
    (root / "texts.txt.xz").write_bytes(lzma.compress("\n".join([*lines, *EVALUATED]).encode()))
    (root / "data" / "sts").mkdir(parents=True)
    (root / "data" / "sts" / "2014.images.test.tsv").write_text("\n".join(f"3\t{text}\tb" for text in EVALUATED))
    return root


@pytest.fixture(scope="module")
def family(place):
    """A command that makes two tiers, and what it prints."""
    texts, rate = place / "texts.txt.xz", ("--passes", 10, "--lr", 1e-2, "--calibration", 200)
    options = ("--target-speedup", "1.3,2", "--distil", texts, *rate, *LEAVE_OUT, place / "data")
    command = (place / "run", *BOARD, *options, "--out", place / "family")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FEWHEADS_DATA", raising=False)
        patch.setitem(sys.modules, "tensorrt_rtx", None)  # so that nobody counts the kernels of an engine
        yield command, json.loads(invoke(reduce, *command, "--json"))


def test_one_command_makes_a_family_that_is_near_the_original(place, family):
    command, (half, most) = family
    assert [run["directory"] for run in (half, most)] == [str(place / "family" / name) for name in ("1.3x", "2x")]
    assert [run["planned"]["kept"] for run in (half, most)] == [[0, 3], [3]]
    assert min(half["closeness"], most["closeness"]) > 0.85
    assert half["expected_speedup"] >= 1.3
    assert most["expected_speedup"] >= 2
    (measure,) = most["metrics"]["measures"]
    assert (measure["metric"], measure["split"]) == ("cosine", "holdout")
    assert measure["value"] == pytest.approx(most["closeness"], abs=0.02)
    left = len({text for text, _ in make_sentiment(500)})
    assert measure["n"] == math.ceil(0.1 * left) < math.ceil(0.1 * (left + len(EVALUATED)))
    config = read_config(place / "family" / "2x")
    assert "restored on" in config.provenance.trainer
    assert config.provenance.seed == 0
    assert config.space == read_config(place / "run").space is not None
    assert not list(place.glob(".family*"))  # the state goes when all is written
    assert (place / ".run.reduction").is_dir()  # where `fewheads plan` has it, too
    assert {path.name for path in (place / "family").iterdir()} == {"1.3x", "2x"}
    assert (place / "family" / "2x" / "log.jsonl").exists()
    assert open_model(place / "family" / "2x").transformer.config.layers == tuple(
        LayerShape(layer["plan"]["shape"]["num_heads"], 16, layer["plan"]["shape"]["ffn_dim"])
        for layer in most["layers"]
    )
    with pytest.raises(UsageError, match=r"--out .*1\.3x: got an existing run"):
        invoke(reduce, *command)
    state = place / ".family.state"  # of an interruption between the first run and the second: they are made anew
    state.write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=r"\.family\.state: got .*, expected the state of a training run"):
        invoke(reduce, *command)


@pytest.mark.slow
def test_tiers_are_served_as_near_to_the_original_as_their_records_say(place, family, tmp_path):
    _, printed = family
    runs = [place / "run", *(Path(run["directory"]) for run in printed)]
    invoke(export, *runs, "--name", "small", "--repository", tmp_path, "--no-measure", "--artifacts", "onnxruntime")
    bundle, tokenizer = Bundle.open(tmp_path / "small-1"), load_tokenizer(place / "run")
    assert {tier.space for tier in bundle.manifest.tiers} == {read_config(place / "run").space}
    tiers = [tier.name for tier in bundle.manifest.tiers if not tier.name.endswith("-int8")]
    lines = lzma.decompress((place / "texts.txt.xz").read_bytes()).decode().splitlines()
    _, held_out = split_holdout(read(place, lines, EVALUATED, leave_out=True).items)
    texts = [text for (text,) in held_out.texts]
    with served_bundles([bundle.path], tmp_path / "cache") as ask, torch.no_grad():
        found = []
        for tier, run in zip(tiers, runs, strict=True):
            answers = [ask("small", {"text": column(text)}, tier=tier)["embedding"][0] for text in texts]
            model = open_model(run).head
            want = [model(torch.tensor([tokenizer.encode(text).ids[:24]]))[0].numpy() for text in texts]
            np.testing.assert_allclose(answers, want, atol=1e-5)
            found.append(answers / np.linalg.norm(answers, axis=1, keepdims=True))
    recorded = [run["metrics"]["measures"][0]["value"] for run in printed]
    assert [(tier * found[0]).sum(axis=1).mean() for tier in found[1:]] == pytest.approx(recorded, abs=1e-5)


def test_models_of_images_are_refused_before_any_data_are_read(place, tmp_path):
    run, data = Path(__file__).parents[1] / "compatibility" / "data" / "trained" / "pictures", tmp_path / "data"
    (data / "sts").mkdir(parents=True)
    (data / "sts" / "2014.images.test.tsv").write_text("malformed")
    command = (*BOARD, "--distil", place / "texts.txt.xz", "--out", tmp_path / "small")
    with pytest.raises(UsageError, match="--distil: got a model for image-classification, expected a model of texts"):
        invoke(reduce, run, *command, "--data", data, "--data-dir", data)


def test_texts_are_compared_with_what_a_run_is_measured_on_and_the_sets_beside_its_data(place, sst2, tmp_path):
    run, data = (shutil.copytree(path, tmp_path / path.name) for path in (sst2 / "SST-2", sst2 / "glue"))
    config = json.loads((run / CONFIG).read_text())
    (run / CONFIG).write_text(json.dumps(config | {"data_dir": str(tmp_path)}))
    known = {text for seed in (0, 1) for text, _ in make_sentiment(360, seed)}
    lines = [text for text, _ in make_sentiment(600, seed=7) if text not in known]
    dev, texts = max((text for text, _ in make_sentiment(40, seed=1)), key=len), tmp_path / "texts.txt"
    texts.write_text("\n".join([*lines, dev]))
    command = (*BOARD, "--calibration", 200, "--distil", texts, "--out", tmp_path / "small")
    with pytest.raises(DataError, match=f"1 of .* with a sentence of an evaluation set, such as '{dev}'"):
        invoke(reduce, run, *command)
    header = ("sentence1", "sentence2", "score")
    write_rows(data / "STS-B" / "dev.tsv", header, [(max(lines, key=len), dev, 1)] * 4)
    with pytest.raises(DataError, match=r"2 of .* with a sentence of an evaluation set"):
        invoke(reduce, run, *command)
    with pytest.raises(DataError, match=r"evaluation sets in .*: got no such directory, expected sts/YEAR\.NAME"):
        invoke(reduce, place / "run", *command, "--leave-out-evaluated", "--data-dir", tmp_path / "none")


def read(place, lines, evaluated=(), leave_out=False):
    path = place / "lines.txt"
    path.write_text("\n".join(lines))
    return read_restoration_texts([path], load_tokenizer(place / "run"), 16, evaluated, leave_out=leave_out)


PLAIN = [text for text, _ in make_sentiment(400)]


def test_texts_are_read_once_and_a_tenth_is_held_out(place):
    found = read(place, [*PLAIN, *PLAIN, ""])
    distinct = len(set(PLAIN))
    assert len(found.train.targets) + len(found.held_out.targets) == distinct
    assert len(found.held_out.targets) == -(-distinct // 10)
    assert max(found.train.lengths) <= 16


def test_texts_of_an_evaluation_are_refused_or_left_out(place):
    evaluated = ["The Cat sat on the: mat film!", "Yes"]
    lines = [*PLAIN, "the cat sat on the mat film", "Good. The cat sat on the mat film."]
    with pytest.raises(DataError) as caught:
        read(place, lines, evaluated)
    assert f"{caught.value.given}".startswith(f"2 of {len({*lines})} with a sentence of an evaluation set")
    assert "--leave-out-evaluated" in caught.value.fix
    assert len(read(place, lines, evaluated, leave_out=True).train.targets) == len(read(place, PLAIN).train.targets)
    assert has_evaluated([("yes",), ("the cat sat on the mat film",)], evaluated).tolist() == [False, True]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (PLAIN[:40], "40 different texts, expected 100 at least"),
        (PLAIN[:1] * 500, "1 different texts, expected 100 at least"),
        ([f"дом номер {number} стоит" for number in range(200)], "unknown tokens"),
    ],
)
def test_texts_that_cannot_restore_are_refused(place, lines, message):
    with pytest.raises(DataError, match=message):
        read(place, lines)


@pytest.mark.parametrize(
    "option", [("--passes", "2"), ("--lr", "1e-3"), ("--leave-out-evaluated",), ("--device", "cpu")]
)
def test_options_of_a_restoration_need_texts(place, option):
    with pytest.raises(UsageError, match=f"{option[0]}: expected --distil with texts beside it"):
        invoke(reduce, place / "run", *BOARD, *option, "--data", place / "texts.txt.xz", "--out", place / "none")


def test_a_family_is_not_written_into_a_run(place, tmp_path):
    out = shutil.copytree(place / "run", tmp_path / "small")
    options = ("--target-speedup", "2,1.5", "--data", place / "texts.txt.xz", "--out", out, "--replace")
    with pytest.raises(UsageError, match=r"small: got an existing run, expected a directory for the runs 1\.5x and 2x"):
        invoke(reduce, place / "run", *BOARD, *options)
