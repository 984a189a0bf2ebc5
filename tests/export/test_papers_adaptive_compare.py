"""The comparison of paper 002's mechanisms with others, on one model."""

import json
from functools import cache

import msgspec
import numpy as np
import pytest
import torch

from edge.errors import UsageError
from export.cli.compare import compare
from export.cli.finetune import finetune
from export.errors import ReductionError
from export.finetune.models import open_model
from export.finetune.objectives import outputs_of
from export.finetune.predictions import predict, read_predictions
from export.papers.adaptive.linformer import LinformerAttention
from export.papers.adaptive.measures import HeadUse, Int8, Speed, head_use, multiplications
from export.papers.adaptive.mechanisms import MECHANISMS, SharedInputs
from export.papers.adaptive.runs import open_compared
from export.papers.adaptive.scores import scored_modules
from export.papers.adaptive.tables import MechanismRecord, difference, order_of, tables_of
from export.papers.adaptive.term import adaptive_term
from export.papers.experiment import read_records
from tests.support.reduction_data import inputs, model
from tests.support.task_data import invoke


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    dense = model(heads=4, head_dim=16, ffn_dim=64)
    return SharedInputs(dense, inputs(rows=64), 0, tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module")
def made(shared):
    return cache(lambda name: MECHANISMS[name].make(shared))


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_changes_a_copy_ignores_padding_and_trains_in_every_part(name, shared, made):
    changed, rows = made(name).model.eval(), inputs(seed=7)
    longest = int(rows.lengths.argmax())
    with torch.no_grad():
        alone = outputs_of(changed, rows.batch(np.array([0])))
        together = outputs_of(changed, rows.batch(np.array([0, longest])))[:1]
    torch.testing.assert_close(alone, together, atol=1e-4, rtol=1e-4)
    difference = np.abs(predict(changed, rows).logits - predict(shared.dense, rows).logits).max()
    assert (float(difference) < 1e-3) is (name in ("full", "global", "literal", "fixed", "budget", "skip")), (
        "until trained"
    )
    batch, kind = shared.batches()[0], MECHANISMS[name].train(shared)
    changed.train().zero_grad()
    loss = changed.loss(outputs_of(changed, batch), batch.targets)
    if kind is not None:
        with adaptive_term(changed, kind) as term:
            term.prepare(0.6)
            loss = changed.loss(outputs_of(changed, batch), batch.targets) + term.loss(0.6)
    loss.backward()
    gradients = [p.grad for name, p in changed.named_parameters() if "segment" not in name]
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients)


def test_half_of_attention_is_left_and_the_bound_counts_scorers(shared, made):
    for name in ("random", "uniform"):
        assert head_use(made(name).model, shared.calibration).kept == pytest.approx(0.5, abs=0.08)
    reduced = made("reduced")
    layers = reduced.model.transformer.config.layers
    assert reduced.kept == sum(shape.num_heads * shape.head_dim for shape in layers) / (2 * 4 * 16)
    assert 0.37 <= reduced.kept <= 0.5
    assert [shape.ffn_dim for shape in layers] == [64, 64]
    batch = shared.batches()[0]
    feeds = {"inputs": batch.inputs[:1].numpy(), "mask": batch.mask[:1].numpy()}
    dense = multiplications(shared.dense, feeds)
    assert multiplications(made("literal").model, feeds) > multiplications(made("budget").model, feeds) > dense
    assert multiplications(MECHANISMS["uniform"].shrink(made("uniform").model), feeds) < dense


def record(name, seed, answers, targets, smaller=True):
    return MechanismRecord(
        name=name,
        what="",
        seed=seed,
        metric="accuracy",
        smaller=smaller,
        holdout=(0.5,),
        use=HeadUse(0.75),
        speeds=(Speed(8, 2.0, 2.1), Speed(None, 3.0, 3.1, 32)),
        peak_bytes=(2**22, (seed + 1) * 2**20),
        int8=Int8(tuple(np.where(np.arange(len(answers)) < 10, 1 - answers, answers).tolist()), 1.5),
        answers=tuple(answers.tolist()),
        targets=tuple(targets.tolist()),
    )


def test_intervals_are_paired_over_items_and_count_seeds():
    random = np.random.default_rng(2)
    targets = random.integers(0, 2, 500)
    theirs = np.where(random.random(500) < 0.7, targets, 1 - targets)
    wrong = np.flatnonzero(theirs != targets)
    ours = [np.where(np.isin(np.arange(500), wrong[:number]), targets, theirs) for number in (12, 12, 40)]
    full = [record("full", seed, theirs, targets) for seed in range(3)]
    seeds = [record("new", seed, answers, targets) for seed, answers in enumerate(ours)]
    one = difference(seeds[:1], full)
    assert one.value == pytest.approx(2.4)
    assert 0 < one.interval[0] < one.value - 1 < one.value + 1 < one.interval[1] < 5, "narrower than unpaired ones"
    same_twice, apart = (difference(runs, full) for runs in (seeds[:2], seeds))
    assert same_twice.interval == pytest.approx(one.interval), "equal predictions are no more evidence"
    assert apart.value == pytest.approx(100 * 64 / 1500)
    assert apart.interval[0] < 0 < apart.interval[1], "three seeds that differ this much decide nothing"
    table, files = tables_of({f"{run.name}{run.seed}": run for run in (*full, *seeds)})
    assert table.rows[0][:4] == ("full", "", 3, "0.75")
    assert (table.rows[1][6], table.rows[1][7:]) == (apart, ("2.00 (2.10)", "3.00 (3.10)", "smaller"))
    changed = 100 * ((theirs[:10] != targets[:10]).sum() - (theirs[:10] == targets[:10]).sum()) / 500
    assert files.rows[0][:3] == ("full", "2", "0.50")
    assert (files.rows[0][3].value, files.rows[0][4]) == (pytest.approx(changed), "1.50")
    texts = [msgspec.structs.replace(run, metric="mean of f1", int8=None) for run in full]
    table, files = tables_of(dict(enumerate(texts)))
    assert table.rows[0][5].value == pytest.approx(100 * theirs.mean())
    assert files.rows[0][3:] == (None, None)
    for metric, ends in (("accuracy", (0, 100)), ("matthews", (-100, 100))):
        pair = zip(full, (targets, 1 - targets), strict=False)
        apart = [msgspec.structs.replace(run, metric=metric, answers=tuple(answers)) for run, answers in pair]
        assert tables_of(dict(enumerate(apart)))[0].rows[0][5].interval == ends, "no wider than the metric"


def test_seeds_decide_the_order_of_the_paper():
    random = np.random.default_rng(5)
    targets = random.integers(0, 2, 2000)

    def runs(name, right, seeds=3):
        return [
            record(name, n, np.where(random.random(2000) < right, targets, 1 - targets), targets) for n in range(seeds)
        ]

    records = [*runs("random", 0.6), *runs("global", 0.8), *runs("budget", 0.8), *runs("budget", 0.8, 5)[3:]]
    (table,) = order_of({f"{run.name}{run.seed}": run for run in records})
    (first, second), change = table.rows, difference(records[3:6], records[:3])
    assert first == ("global over random", 3, "0.75 and 0.75", change, "better")
    assert (second[0], second[1], second[4]) == ("budget over global", 3, "undecided")
    swapped = [
        msgspec.structs.replace(run, name={"random": "global", "global": "random"}[run.name]) for run in records[:6]
    ]
    assert order_of(dict(enumerate(swapped)))[0].rows[0][4] == "worse"
    assert order_of(dict(enumerate([swapped[0], swapped[3]])))[0].rows[0][4] == "undecided", "one seed"
    assert not order_of({"random0": records[0]})


def test_the_command_compares_and_refuses_other_settings(place):
    options = (place / "SST-2", "--data-dir", place, "--limit", 64, "--out", place / "out", "--keep-runs")
    options = (*options, "--only", "uniform", "--only", "skip", "--only", "linformer")
    table, of_files = json.loads(invoke(compare, *options, "--json"))["tables"]
    for one in (table, of_files):
        assert [row[0] for row in one["rows"]] == ["full", "uniform", "linformer", "skip"]
    records = read_records(place / "out", MechanismRecord)
    full, uniform, linformer, skip = records.values()
    of_rows = [(1, None), (32, None)]
    assert [[(speed.rows, speed.tokens) for speed in one.speeds] for one in records.values()] == [
        *[[(1, 8), (1, 64), *of_rows]] * 3,
        of_rows,
    ]
    assert [len(one.holdout) for one in records.values()] == [1, 1, 2, 1]
    assert all(all(2**20 < peak < 2**30 for peak in one.peak_bytes) for one in records.values())
    assert [one.int8 is None for one in records.values()] == [False, False, False, True]
    assert np.mean(np.array(full.int8.answers) == full.answers) > 0.9
    assert np.shape(uniform.use.by_head) == np.shape(uniform.use.deviations) == (2, 2)
    assert np.allclose(uniform.use.by_head, 0.5)
    assert not linformer.use.by_head
    assert (place / "out" / "scores.png").stat().st_size > 1000
    assert uniform.use.kept == pytest.approx(0.5, abs=0.01)
    assert all(speed.bound > 1 for speed in uniform.speeds)
    assert [speed.bound for speed in full.speeds] == [1, 1, 1, 1]
    assert linformer.speeds[1].bound > 1
    assert skip.use.kept > 0.5
    assert not list((place / "out" / "unfinished").iterdir())
    kept = open_compared(place / "out" / "runs" / "uniform-seed0")
    assert [layer.attention.head_dim for layer in kept.head.transformer.layers] == [8, 8]
    assert len(scored_modules(open_compared(place / "out" / "runs" / "skip-seed0").head)) == 2
    mixed = open_compared(place / "out" / "runs" / "linformer-seed0").head.transformer.layers[0].attention
    assert isinstance(mixed, LinformerAttention)
    assert tuple(read_predictions(place / "out" / "runs" / "skip-seed0", "dev").answers) == skip.answers
    assert open_model(place / "out" / "runs" / "full-seed0").metrics.splits == ("holdout", "dev")
    with pytest.raises(UsageError, match=r"got recipe\.peak_learning_rate 0\.0001, expected .* 0\.001\."):
        invoke(compare, *options, "--lr", 1e-3)


def test_a_model_of_images_is_timed_on_images_of_its_one_size(tmp_path):
    pytest.importorskip("sklearn", reason="scikit-learn is absent")
    shape = ("--dim", 16, "--depth", 2, "--heads", 2, "--epochs", 1, "--lr", 1e-2, "--no-report")
    invoke(finetune, "digits", *shape, "--out", tmp_path)
    options = ("--only", "skip", "--limit", 64, "--epochs", 2, "--lr", 1e-9, "--keep-runs", "--no-plots")
    invoke(compare, tmp_path / "digits", *options, "--out", tmp_path / "out")
    full, skip = read_records(tmp_path / "out", MechanismRecord).values()
    for one in (full, skip):
        assert [(speed.rows, speed.tokens) for speed in one.speeds] == [(1, None), (32, None)]
        assert len(one.answers) == 360
        metrics = open_compared(tmp_path / "out" / "runs" / f"{one.name}-seed0").metrics
        assert (metrics.epochs, metrics.best_epoch) == (2, 2), "the last one is kept, though none is better"
    assert np.mean(np.array(full.int8.answers) == full.answers) > 0.9
    assert skip.use.kept > 0.5


def test_wrong_arguments_are_rejected_before_training(place, tmp_path):
    (tmp_path / "file").write_text("")
    run, data = place / "SST-2", ("--data-dir", place)
    few = (run, *data, "--only", "reduced", "--limit", 4, "--out", tmp_path / "out")
    with pytest.raises(ReductionError, match=r"calibration set: got \d+ tokens .*expected more than 64"):
        invoke(compare, *few)
    assert not (tmp_path / "out").exists()
    for arguments, message in (
        ((run, *data, "--only", "magic", "--out", tmp_path / "out"), r"got 'magic', expected one of full, random"),
        ((place / "model", *data, "--out", tmp_path / "new"), "without a task"),
        ((run, *data, "--out", tmp_path / "file" / "below"), "which is not a directory"),
    ):
        with pytest.raises(UsageError, match=message):
            invoke(compare, *arguments)
