import json
from functools import cache

import numpy as np
import pytest
import torch

from edge.bundles.golden import Golden
from edge.bundles.manifest import Tolerance
from edge.errors import UsageError
from export.adaptive.term import adaptive_term
from export.adaptive.use import head_use
from export.convert import largest_difference, to_onnx
from export.errors import CheckpointError, ReductionError
from export.experiments.attention.cli import compare as command
from export.experiments.attention.compare import RESULTS, read_result
from export.experiments.attention.lengths import LITERAL, measure_lengths, no_logits_bound
from export.experiments.attention.mechanisms import ABLATIONS, MECHANISMS, random_scores
from export.experiments.attention.records import Record, read_record, save_record
from export.experiments.attention.stopwatch import Speed, multiplications, predict_int8
from export.experiments.attention.summary import paired, row_of
from export.intervals import interval
from export.tasks.metrics import accuracy
from export.tasks.objectives import outputs_of, task_loss
from export.tasks.predictions import Predictions, predict
from tests.support.reduction_data import inputs
from tests.support.task_data import invoke

ALL = MECHANISMS | ABLATIONS
#: What changes nothing until it is trained.
EXACT = {"full", "skip", "literal", "fixed", "budget", *ABLATIONS} | {"global"}


@pytest.fixture(scope="module")
def made(shared):
    """Return the changed model of a mechanism, made once."""
    return cache(lambda name: ALL[name].make(shared))


def each(names=ALL):
    """One parameter for each mechanism; the one that times all its options is slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name == "ours" else name for name in names]


@pytest.mark.parametrize("name", each())
def test_a_mechanism_leaves_the_dense_model_alone_and_ignores_padding(name, shared, made):
    changed = made(name).model.eval()
    rows = inputs(seed=7)
    longest = int(rows.lengths.argmax())
    with torch.no_grad():
        alone = outputs_of(changed, rows.batch(np.array([0])))
        together = outputs_of(changed, rows.batch(np.array([0, longest])))[:1]
    torch.testing.assert_close(alone, together, atol=1e-4, rtol=1e-4)
    differences = np.abs(predict(changed, rows).logits - predict(shared.dense, rows).logits)
    assert np.isfinite(differences).all()
    assert (float(differences.max()) < 1e-3) is (name in EXACT)


@pytest.mark.parametrize("name", each())
def test_a_mechanism_can_be_trained_in_every_part(name, shared, made):
    changed = made(name).model.train()
    batch = shared.batches()[0]
    how = ALL[name].train(shared)
    changed.zero_grad()
    if how is None:
        task_loss(changed, outputs_of(changed, batch), batch.targets).backward()
    else:
        with adaptive_term(changed, how) as term:
            term.prepare(0.6)
            loss = task_loss(changed, outputs_of(changed, batch), batch.targets)
            (loss + term.loss(0.6)).backward()
        without = [p for p in term.rates if p.grad is None]
        assert not without
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in changed.parameters())
    used = [p for n, p in changed.named_parameters() if "segment" not in n]
    assert sum(p.grad is not None for p in used) == len(used)


@pytest.mark.parametrize("name", each(name for name, mechanism in ALL.items() if mechanism.shrink))
def test_smaller_matrices_have_the_outputs_of_the_masked_ones(name, shared, made):
    changed = made(name).model.eval()
    small = ALL[name].shrink(changed)
    rows = inputs(seed=8)
    np.testing.assert_allclose(predict(small, rows).logits, predict(changed, rows).logits, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linformer", "bigbird", "skip", "global", "random", "literal", "budget"])
def test_exported_mechanisms_have_the_outputs_of_torch(name, shared, made):
    changed = made(name).model.eval()
    batch = shared.batches()[0]
    feeds = {"inputs": batch.inputs[:2], "mask": batch.mask[:2]}
    exported = to_onnx(changed, feeds, ["logits"], {})
    with torch.no_grad():
        wanted = changed(*feeds.values())
    golden = Golden({n: t.numpy() for n, t in feeds.items()}, {"logits": wanted.numpy()})
    assert largest_difference(exported, golden, Tolerance(atol=1e-3, rtol=1e-3), name) < 1e-3


def test_half_of_attention_is_left(shared, made):
    for name in ("random", "uniform"):
        assert np.mean(head_use(made(name).model, shared.calibration).kept) == pytest.approx(0.5, abs=0.08)
    for name in ("gradient", "ours-attention"):
        assert np.mean(made(name).kept) == pytest.approx(0.5, abs=0.13)
        config = made(name).model.transformer.config
        widths = [shape.num_heads * shape.head_dim for shape in config.layers]
        assert sum(widths) <= sum(4 * 16 for _ in widths) / 2
        assert [shape.ffn_dim for shape in config.layers] == [64, 64]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.7])
def test_random_scores_leave_their_share(share):
    scores = random_scores(400, share, torch.Generator().manual_seed(0))
    assert torch.where(scores > 0.5, torch.ones(400), scores).mean().item() == pytest.approx(share, abs=0.01)
    assert not torch.equal(scores, scores.sort().values)


def test_a_multiplication_count_includes_scorers_and_dense_masks(shared, made):
    batch = shared.batches()[0]
    feeds = {"inputs": batch.inputs[:1], "mask": batch.mask[:1]}
    dense = multiplications(shared.dense, feeds)
    assert multiplications(made("bigbird").model, feeds) == dense
    assert multiplications(made("literal").model, feeds) > multiplications(made("budget").model, feeds) > dense
    assert multiplications(ALL["uniform"].shrink(made("uniform").model), feeds) < dense


def test_a_speed_beyond_its_bound_is_not_explained():
    assert Speed(8, 1.0, 1.5, 1.5, 1.4).explained
    assert not Speed(8, 1.0, 1.6, 1.6, 1.4).explained
    assert Speed(8, 1.0, 9.0, 9.0).explained, "INT8 has no bound in multiplications"


@pytest.mark.slow
def test_int8_answers_nearly_the_same(shared):
    rows = inputs(seed=9)
    wanted, found = predict(shared.dense, rows), predict_int8(shared.dense, rows)
    assert np.corrcoef(wanted.logits.ravel(), found.logits.ravel())[0, 1] > 0.95


def test_paired_intervals_are_narrower_than_single_ones():
    random = np.random.default_rng(2)
    targets = random.integers(0, 2, 500)
    theirs = np.where(random.random(500) < 0.7, targets, 1 - targets)
    wrong = np.flatnonzero(theirs != targets)[:12]
    ours = theirs.copy()
    ours[wrong] = targets[wrong]
    one, other = (Predictions(np.eye(2, dtype=np.float32)[classes], targets) for classes in (ours, theirs))
    found = paired("accuracy", [one], [other])
    assert found.value == pytest.approx(12 / 500)
    assert found.interval[0] > 0
    low, high = interval(accuracy, theirs, targets)
    assert high - low > 2 * (found.interval[1] - found.interval[0])
    assert paired("accuracy", [other], [one]).value == -found.value
    assert paired("accuracy", [one, one], [other, other]) == found, "the same predictions twice are no more evidence"


@pytest.mark.slow
def test_lengths_are_measured_once(shared, tmp_path):
    config, path = shared.dense.transformer.config, tmp_path / "lengths.json"
    found = measure_lengths(config, (16,), 2, path)
    assert found[0].variant == LITERAL
    assert len(found) == 3
    assert found[0].bound == no_logits_bound(config, 16) < 1.3
    assert measure_lengths(config, (16,), 2, path) == found
    path.write_text("{")
    assert len(measure_lengths(config, (16,), 2, path)) == 3


def options_of(place, *names):
    chosen = [part for name in names for part in ("--only", name)]
    return (place / "SST-2", "--data-dir", place, *chosen, "--calls", 2, "--no-lengths", "--out", place / "out")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_command_compares_resumes_and_draws(place):
    options = options_of(place, "uniform", "fixed")
    result = json.loads(invoke(command, *options, "--no-plots", "--json"))
    assert [row["name"] for row in result["rows"]] == ["full", "full+int8", "uniform", "fixed"]
    full, int8, uniform, fixed = result["rows"]
    assert full["differences"]["dev"]["value"] == 0
    assert uniform["kept"] == pytest.approx(0.5, abs=0.01)
    assert uniform["bounds"].values()
    assert (uniform["smaller"], fixed["smaller"]) == (True, False)
    assert 0 < fixed["score"] < 1
    assert int8["bounds"] == {}
    records = sorted((place / "out" / "seed0").glob("*/record.json"))
    times = [path.stat().st_mtime_ns for path in records]
    # One more: what is finished stays, and the pictures are drawn.
    table = invoke(command, *options_of(place, "uniform", "fixed", "bigbird"))
    assert "bigbird" in table
    assert [path.stat().st_mtime_ns for path in records] == times
    assert {path.name for path in (place / "out").glob("*.png")} == {
        "accuracy_by_speed.png",
        "heads.png",
        "scores_by_place.png",
    }
    assert len(read_result(place / "out").rows) == 5
    assert not list((place / "out" / "seed0").glob(".*.state"))
    with pytest.raises(UsageError, match=r"got recipe\.peak_learning_rate 0\.0001, expected .* 0\.001\."):
        invoke(command, *options, "--lr", 1e-3)


def test_a_record_is_read_as_written_and_a_broken_one_is_rejected(tmp_path):
    record = Record(
        name="full",
        what="",
        seed=0,
        smaller=True,
        parameters=1,
        scores=(0.5,),
        seconds=1.0,
        speeds=(Speed(8, 1.0, 2.0, 2.0, 2.1),),
        kept=((1.0, 0.5),),
    )
    place = tmp_path / "full"
    assert read_record(place) is None
    predictions = Predictions(np.eye(3, dtype=np.float32), np.arange(3))
    save_record(place, record, {"dev": predictions})
    assert read_record(place) == record
    row = row_of([place], [place], "accuracy", ["dev"])
    assert (row.values, row.speeds, row.bounds, row.kept) == ({"dev": 1.0}, {8: 2.0}, {8: 2.1}, 0.75)
    assert row.differences["dev"].value == 0
    (place / "record.json").write_text("{")
    with pytest.raises(CheckpointError, match="Delete the directory"):
        read_record(place)


def test_too_few_calibration_examples_are_rejected_before_training(place, tmp_path):
    options = (place / "SST-2", "--only", "ours", "--limit", 4, "--no-plots", "--out", tmp_path / "out")
    with pytest.raises(ReductionError, match=r"calibration set: got \d+ tokens .*expected more than 64"):
        invoke(command, *options)
    assert not (tmp_path / "out").exists()


def test_wrong_arguments_are_rejected(place, tmp_path):
    (tmp_path / "file").write_text("")
    for arguments, message in (
        (options_of(place, "magic"), r"got 'magic', expected one of full, linformer"),
        ((place / "model", "--data-dir", place, "--out", tmp_path / "new"), "without a task"),
        ((*options_of(place, "full"), "--beside", tmp_path), "has finished"),
        ((*options_of(place, "full")[:-1], tmp_path / "file" / "below"), "which is no directory"),
    ):
        with pytest.raises(UsageError, match=message):
            invoke(command, *arguments)
    (tmp_path / RESULTS).write_text("{}")
    with pytest.raises(UsageError, match="has finished"):
        read_result(tmp_path)
