import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from edge.bundles.golden import Golden
from edge.bundles.manifest import Tolerance
from edge.errors import UsageError
from export.errors import CheckpointError, ReductionError
from export.finetune.objectives import outputs_of, task_loss
from export.finetune.predictions import Predictions, accuracy, encode_predictions, paired, predict
from export.finetune.recipe import Recipe
from export.models.attention import MultiHeadAttention
from export.models.convert import largest_difference, to_onnx
from export.papers.adaptive.baselines import (
    BLOCK,
    RATIO,
    LinformerAttention,
    SparseAttention,
    like,
    sparse_pattern,
)
from export.papers.adaptive.compare import RESULTS, read_result, unfinished_jobs
from export.papers.adaptive.inputs import read_inputs, settings_of
from export.papers.adaptive.lengths import LITERAL, measure_lengths, no_logits_bound
from export.papers.adaptive.mechanisms import ABLATIONS, MECHANISMS
from export.papers.adaptive.records import Record, read_record, save_record
from export.papers.adaptive.reductions import pruned_by_gradient
from export.papers.adaptive.run import compare as command
from export.papers.adaptive.run import place_of, time_mechanism, trained_place
from export.papers.adaptive.stopwatch import Speed, Stopwatch, multiplications
from export.papers.adaptive.summary import row_of
from export.papers.adaptive.term import adaptive_term
from export.papers.adaptive.use import head_use
from export.training.intervals import interval
from export.training.jobs import run_jobs
from tests.support.reduction_data import inputs, model
from tests.support.task_data import invoke

ALL = MECHANISMS | ABLATIONS
#: Mechanisms that change nothing until they are trained.
EXACT = {"full", "skip", "literal", "fixed", "budget", *ABLATIONS} | {"global"}


@pytest.fixture(scope="module")
def made(shared):
    return cache(lambda name: ALL[name].make(shared))


@pytest.mark.parametrize("name", ALL)
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


@pytest.mark.parametrize("name", ALL)
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
            (task_loss(changed, outputs_of(changed, batch), batch.targets) + term.loss(0.6)).backward()
        assert not [p for p in term.rates if p.grad is None]
    gradients = [p.grad for name, p in changed.named_parameters() if "segment" not in name]
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients)


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
        layers = made(name).model.transformer.config.layers
        assert sum(shape.num_heads * shape.head_dim for shape in layers) <= 4 * 16
        assert [shape.ffn_dim for shape in layers] == [64, 64]


def test_a_multiplication_count_includes_scorers_and_dense_masks(shared, made):
    batch = shared.batches()[0]
    feeds = {"inputs": batch.inputs[:1], "mask": batch.mask[:1]}
    dense = multiplications(shared.dense, feeds)
    assert multiplications(made("bigbird").model, feeds) == dense
    assert multiplications(made("literal").model, feeds) > multiplications(made("budget").model, feeds) > dense
    assert multiplications(ALL["uniform"].shrink(made("uniform").model), feeds) < dense


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
    assert (found[0].variant, len(found)) == (LITERAL, 3)
    assert found[0].bound == no_logits_bound(config, 16) < 1.3
    assert measure_lengths(config, (16,), 2, path) == found
    path.write_text("{")
    assert len(measure_lengths(config, (16,), 2, path)) == 3


@pytest.mark.timeout(900)
def test_a_mechanism_is_trained_in_a_job_and_timed_later(place, tmp_path):
    run, mechanisms = place / "SST-2", [ALL["uniform"]]
    inputs = read_inputs(run, place, 64)
    chosen = {"recipe": Recipe(epochs=1), "limit": 64, "seeds": (0,), "distil": False, "share": 0.5}
    settings = settings_of(inputs, run, tokens=8, target_speedup=1.5, calls=2, **chosen)

    def jobs():
        return unfinished_jobs(inputs, settings, mechanisms, run=run, data_dir=place, directory=tmp_path, device="cpu")

    (job,) = jobs()
    run_jobs([job], logs=tmp_path / "logs")
    assert read_record(trained_place(place_of(tmp_path, 0, "uniform"))).speeds == ()
    assert jobs() == []
    directory = place_of(tmp_path, 0, "uniform")
    time_mechanism(directory, Stopwatch(inputs.dense, 2))
    record = read_record(directory)
    assert [speed.tokens for speed in record.speeds] == [8, 64]
    assert all(speed.bound > 1 and speed.milliseconds > 0 for speed in record.speeds)
    assert not trained_place(directory).exists()
    assert jobs() == []


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
    assert (full["differences"]["dev"]["value"], uniform["kept"]) == (0, pytest.approx(0.5, abs=0.01))
    assert uniform["bounds"].values()
    assert (uniform["smaller"], fixed["smaller"]) == (True, False)
    assert 0 < fixed["score"] < 1
    assert int8["bounds"] == {}
    records = sorted((place / "out" / "seed0").glob("*/record.json"))
    times = [path.stat().st_mtime_ns for path in records]
    # One more mechanism: finished ones are kept, and the figures are drawn.
    assert "bigbird" in invoke(command, *options_of(place, "uniform", "fixed", "bigbird"))
    assert [path.stat().st_mtime_ns for path in records] == times
    drawn = sorted(path.name for path in (place / "out").glob("*.png"))
    assert drawn == ["accuracy_by_speed.png", "heads.png", "scores_by_place.png"]
    assert len(read_result(place / "out").rows) == 5
    assert not list((place / "out" / "seed0").glob(".*"))
    with pytest.raises(UsageError, match=r"got recipe\.peak_learning_rate 0\.0001, expected .* 0\.001\."):
        invoke(command, *options, "--lr", 1e-3)


def test_a_record_explains_its_speeds_and_is_read_as_written(tmp_path):
    assert Speed(8, 1.0, 1.5, 1.5, 1.4).explained
    assert not Speed(8, 1.0, 1.6, 1.6, 1.4).explained
    assert Speed(8, 1.0, 9.0, 9.0).explained, "INT8 has no bound in multiplications"
    found = {"speeds": (Speed(8, 1.0, 2.0, 2.0, 2.1),), "kept": ((1.0, 0.5),), "scores": (0.5,), "seconds": 1.0}
    record = Record(name="full", what="", seed=0, smaller=True, parameters=1, **found)
    place = tmp_path / "full"
    assert read_record(place) is None
    save_record(place, record, encode_predictions({"dev": Predictions(np.eye(3, dtype=np.float32), np.arange(3))}))
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
        ((*options_of(place, "full")[:-1], tmp_path / "file" / "below"), "which is not a directory"),
    ):
        with pytest.raises(UsageError, match=message):
            invoke(command, *arguments)
    (tmp_path / RESULTS).write_text("{}")
    with pytest.raises(UsageError, match="has finished"):
        read_result(tmp_path)


DIM, HEADS, WIDTH, POSITIONS = 16, 2, 8, 32


@pytest.fixture
def dense():
    torch.manual_seed(0)
    return MultiHeadAttention(DIM, HEADS, WIDTH).eval()


def tokens(length, seed=0):
    return torch.randn(2, length, DIM, generator=torch.Generator().manual_seed(seed))


def test_linformer_attends_to_means_of_four(dense):
    linformer = like(LinformerAttention(DIM, HEADS, WIDTH, POSITIONS), dense)
    x = tokens(8)
    means = x.unflatten(1, (-1, RATIO)).mean(dim=2)  # linear, so the mean of keys is the key of the mean
    projections = (dense.q_proj, x), (dense.k_proj, means), (dense.v_proj, means)
    q, k, v = (projection(y).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for projection, y in projections)
    heads = (q @ k.transpose(-1, -2) / WIDTH**0.5).softmax(dim=-1) @ v
    torch.testing.assert_close(linformer(x)[0], dense.output_proj(heads.transpose(1, 2).flatten(2)))


def test_bigbird_is_dense_while_all_blocks_are_neighbours(dense):
    sparse = like(SparseAttention(DIM, HEADS, WIDTH, POSITIONS, seed=0), dense)
    short, long = tokens(2 * BLOCK), tokens(POSITIONS)
    assert torch.equal(sparse(short)[0], dense(short)[0])
    assert not torch.allclose(sparse(long)[0], dense(long)[0])
    assert set(sparse.state_dict()) == set(dense.state_dict())


def test_bigbird_hides_what_the_pattern_leaves_out(dense):
    sparse = like(SparseAttention(DIM, HEADS, WIDTH, POSITIONS, seed=0), dense)
    x, hidden = tokens(POSITIONS), sparse_pattern(POSITIONS, seed=0)[-1] == 0
    assert hidden.any()
    torch.testing.assert_close(sparse(torch.where(hidden[:, None], x + 5, x))[0][:, -1], sparse(x)[0][:, -1])


def test_the_pattern_is_window_global_and_random():
    pattern = sparse_pattern(64, seed=1)
    blocks = pattern[::BLOCK, ::BLOCK]
    assert (pattern.unflatten(0, (-1, BLOCK)).std(dim=1) == 0).all()
    assert blocks[0].all()
    assert blocks[:, 0].all()
    assert all(blocks.diagonal(offset).eq(1).all() for offset in (-1, 0, 1))
    assert 3 <= blocks[5:-1].sum(dim=1).min() <= blocks[5:-1].sum(dim=1).max() <= 5
    assert not torch.equal(pattern, sparse_pattern(64, seed=2))
    assert torch.equal(pattern, sparse_pattern(64, seed=1))


def test_gradient_pruning_takes_the_heads_that_count_least(shared):
    """Heads whose output goes nowhere have no gradient, and go first."""
    useless = model(heads=4, head_dim=16, ffn_dim=64)
    with torch.no_grad():
        for layer in useless.transformer.layers:
            layer.attention.output_proj.weight[:, 16:48] = 0  # heads 1 and 2
    pruned = pruned_by_gradient(replace(shared, dense=useless))
    assert pruned.kept == ((1, 0, 0, 1), (1, 0, 0, 1))
    rows = inputs(seed=3)
    np.testing.assert_allclose(predict(pruned.model, rows).logits, predict(useless, rows).logits, atol=1e-4)


def test_a_layer_may_lose_all_its_heads(shared):
    useless = model(heads=4, head_dim=16, ffn_dim=64)
    useless.transformer.layers[0].attention.output_proj.weight.data.mul_(1e-6)
    pruned = pruned_by_gradient(replace(shared, dense=useless, share=1 / 8))
    assert sum(map(sum, pruned.kept)) == 1
    assert None in [layer.attention for layer in pruned.model.transformer.layers]
    assert np.isfinite(predict(pruned.model, inputs()).logits).all()
