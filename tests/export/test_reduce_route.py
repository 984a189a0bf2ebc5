import json
import shutil

import msgspec
import numpy as np
import pytest
import sklearn.metrics

from edge.errors import UsageError
from export.cli.finetune import finetune
from export.cli.route import route as command
from export.data.examples import Examples
from export.data.tokens import encode, load_tokenizer
from export.errors import CheckpointError
from export.finetune.models import open_tuned
from export.finetune.predictions import encode_predictions, read_predictions
from export.finetune.text_tasks import TASKS
from export.reduce import route
from export.reduce.route import Router, pooled_embeddings
from export.reduce.routing import (
    Correctness,
    Policy,
    choose,
    diagnose,
    judge,
    oracle,
    right_at_cost,
    shuffled_at_cost,
    static,
    thresholds,
)
from export.training.runs import CONFIG, PREDICTIONS
from tests.support.task_data import invoke

RATIO = 0.4


def make_items(number=2000, ratio=RATIO):
    """Items of which the lean tier answers 80 % right and the full one 90 %, independently."""
    lean, full = np.random.default_rng(5).random((2, number)) < [[0.8], [0.9]]
    return Correctness(lean.astype(float), full.astype(float), ratio)


def judged_best(items, policy):
    return choose(judge(items, [(policy, threshold) for threshold in thresholds(policy)]))[policy.name]


def test_the_cost_of_a_cascade_includes_both_tiers():
    items = Correctness(np.array([1.0, 0, 0, 1]), np.array([1.0, 1, 0, 0]), 0.25)
    scores = np.array([0.9, 0.1, 0.2, 0.8])
    cascade, linear = judge(items, [(Policy("cascade", scores, cascade=True), 0.5), (Policy("linear", scores), 0.5)])
    assert (cascade.mean_cost, linear.mean_cost, cascade.accuracy) == (0.75, 0.625, 0.75)


def test_a_budget_is_met_exactly_through_ties():
    items, coarse = make_items(), np.random.default_rng(0).integers(4, size=2000).astype(float)
    for policy in (Policy("a", coarse), Policy("b", coarse, cascade=True)):
        spent = 1.0 if policy.cascade else 1 - RATIO
        for cost in np.linspace(RATIO, 1, 7):
            wrong = items._replace(lean_right=np.zeros(2000), full_right=np.ones(2000))  # right where escalated
            escalated = right_at_cost(wrong, policy, cost)
            assert RATIO + escalated.mean() * spent == pytest.approx(cost, abs=1e-12)
            assert RATIO + shuffled_at_cost(wrong, policy, cost).mean() * spent == pytest.approx(cost, abs=1e-12)


def test_static_is_the_line_between_the_tiers_and_never_pays_for_a_worse_one():
    items = make_items()
    costs = np.linspace(RATIO, 1, 5)
    lean, full = items.lean_right.mean(), items.full_right.mean()
    found = [right_at_cost(items, static(items), cost).mean() for cost in costs]
    assert np.allclose(found, np.interp(costs, [RATIO, 1], [lean, full]))
    worse = items._replace(lean_right=items.full_right, full_right=items.lean_right)
    assert right_at_cost(worse, static(worse), 1).mean() == full


def test_a_perfect_router_reaches_the_oracle_and_is_recommended():
    items = make_items()
    perfect = Policy("linear", 1 - (items.advantage > 0).astype(float))
    best = judged_best(items, perfect)
    assert best.accuracy == np.maximum(items.lean_right, items.full_right).mean()
    assert best.accuracy == right_at_cost(items, oracle(items), best.mean_cost).mean()
    diagnosis = diagnose([best])
    assert (diagnosis.adaptive, diagnosis.recommendation) == (True, "linear")
    assert "above 0" in diagnosis.reason


def test_the_best_of_many_useless_policies_is_rarely_recommended():
    items = make_items(500)
    draws = np.random.default_rng(7).random((40, 500))
    results = [diagnose([judged_best(items, Policy("p", draw))]) for draw in draws]
    assert sum(result.adaptive for result in results) <= 4  # 2.5 % of 40 is 1; the chance of more is below 1 in 250
    assert {r.recommendation for r in results if not r.adaptive} == {"ship static tiers"}


def test_gains_are_over_the_static_mix_and_shuffled_scores_have_none():
    items = make_items()
    policy = Policy("linear", items.lean_right + np.random.default_rng(1).normal(size=len(items.lean_right)))
    one = judge(items, [(policy, 0.5)])[0]
    cost = one.mean_cost
    mixed = right_at_cost(items, static(items), cost).mean()
    assert one.over_static.value == pytest.approx(one.accuracy - mixed)
    without = shuffled_at_cost(items, policy, cost).mean()
    assert one.over_shuffled.value == pytest.approx(one.accuracy - without)
    assert without == pytest.approx(mixed, abs=0.005)
    assert one.over_static.interval[0] > 0


def test_a_cascade_that_costs_more_than_the_full_tier_is_compared_with_it():
    items = make_items()
    judged = judge(items, [(Policy("cascade", np.zeros(len(items.lean_right)), cascade=True), 1.0)])[0]
    assert (judged.mean_cost, judged.over_static.value) == (pytest.approx(1 + RATIO), pytest.approx(0))


def test_the_regression_finds_the_signal_and_needs_both_classes():
    generator = np.random.default_rng(0)
    features = np.column_stack([generator.normal(size=(600, 5)), np.ones(600)])
    targets = (generator.random(600) < 1 / (1 + np.exp(-3 * features[:, 2] - 1))).astype(float)
    scores = Router(features, targets).scores(features)
    assert sklearn.metrics.roc_auc_score(targets, scores) > 0.85
    assert np.corrcoef(scores, features[:, 2])[0, 1] > 0.98
    assert not Router(features, np.ones(600)).scores(features).any()


@pytest.fixture(scope="module")
def lean(place):
    """A run of the smaller model that saw little."""
    options = ("--data-dir", place, "--max-length", 32, "--epochs", 2, "--lr", 1e-3, "--limit", 32, "--name", "Half")
    invoke(finetune, "SST-2", "--model", place / "small", "--out", place, *options, "--final")
    return place / "Half"


@pytest.fixture
def arguments(place, lean):
    return (place / "SST-2", lean, "--data-dir", place, "--cost-ratio", 0.5)


def copied(run, to, **splits):
    shutil.copytree(run, to)
    (to / PREDICTIONS).write_bytes(encode_predictions(splits))
    return to


def test_the_command_prints_and_writes_its_result(arguments, tmp_path):
    table = invoke(command, *arguments, "--out", tmp_path / "route.json")
    assert "choosing half" in table
    assert "ship static tiers" in table or "Both gains" in table
    printed = json.loads(invoke(command, *arguments, "--json"))
    assert printed == json.loads((tmp_path / "route.json").read_text())
    assert [split["split"] for split in printed["splits"]] == ["choosing half", "dev"]
    for split in printed["splits"]:
        assert [policy["judged"]["policy"] for policy in split["policies"]] == ["cascade", "linear"]
        assert set(split["policies"][0]["controls"]) == {"static", "shuffled", "oracle"}
    margin = printed["splits"][0]["policies"][0]["judged"]["threshold"]
    assert printed["cascade"] == {"type": "cascade", "lean": "half", "full": "x1", "margin": margin}
    assert printed["splits"][1]["policies"][0]["judged"]["threshold"] == margin


def test_halves_of_a_hold_out_keep_sentences_and_sources_together(tmp_path):
    parts = ("a fine film ", "film ", "so it is ")  # the second stands within the first
    rows = [(f"s{number % 40}", f"{part}{number}") for number in range(80) for part in parts]
    path = tmp_path / "glue" / "CoLA" / "train.tsv"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(f"{source}\t1\t\t{text}" for source, text in rows))
    examples = Examples(tuple((text,) for _, text in rows), np.zeros(len(rows)))
    sentences, sources = (TASKS[task].held(examples, tmp_path, 0.5, 1) for task in ("SST-2", "CoLA"))
    assert (sentences[::3] == sentences[1::3]).all()
    assert sentences.mean() == pytest.approx(0.5, abs=0.02)
    of_source = [sources[[source == f"s{number}" for source, _ in rows]] for number in range(40)]
    assert sum(held.all() for held in of_source) == 10  # half of what is held out
    assert sources.mean() == 0.5


def test_the_half_that_chooses_is_new_to_the_half_that_fits(arguments, monkeypatch):
    halves, take = {}, route._Split.take

    def taken(split, name, rows):
        halves[name] = rows
        return take(split, name, rows)

    monkeypatch.setattr(route._Split, "take", taken)
    invoke(command, *arguments)
    data_dir = arguments[arguments.index("--data-dir") + 1]
    held = TASKS["SST-2"].held(TASKS["SST-2"].examples(data_dir).holdout, data_dir, 0.5, route._HALVES_SEED)
    assert (halves["choosing half"] == held).all()
    assert (halves["fitting half"] == ~held).all()


def test_dev_decides_nothing(place, arguments, tmp_path):
    full, lean = arguments[:2]
    kept = {split: read_predictions(lean, split) for split in ("holdout", "dev")}
    worse = msgspec.structs.replace(kept["dev"], logits=-kept["dev"].logits)
    other = copied(lean, tmp_path / "Half", holdout=kept["holdout"], dev=worse)
    here, there = (json.loads(invoke(command, full, run, *arguments[2:], "--json")) for run in (lean, other))
    assert (here["diagnosis"], here["cascade"]) == (there["diagnosis"], there["cascade"])
    assert here["splits"][0] == there["splits"][0]
    assert here["splits"][1]["lean_accuracy"] == pytest.approx(1 - there["splits"][1]["lean_accuracy"])


def test_the_linear_router_reads_embeddings_without_padding(place, lean):
    model = open_tuned(lean, "SST-2")
    rows = encode(load_tokenizer(lean), TASKS["SST-2"].read(place, "dev"), 32)
    pooled = pooled_embeddings(model, rows)
    first = rows.batch(np.array([0]))
    expected = model.transformer.embeddings(first.inputs, first.segments)[0].mean(dim=0).detach().numpy()
    assert pooled[0] == pytest.approx(expected, abs=1e-5)


def test_runs_that_cannot_be_routed(place, arguments, tmp_path):
    full, lean = arguments[:2]
    other = copied(full, tmp_path / "other")
    (other / CONFIG).write_text((other / CONFIG).read_text().replace('"task": "SST-2"', '"task": "CoLA"'))
    holdout = read_predictions(lean, "holdout")
    turned = copied(lean, tmp_path / "turned", holdout=msgspec.structs.replace(holdout, targets=1 - holdout.targets))
    ratios = "cost ratio: .* lean time / full time.*fewheads reduce"
    for one, another, ratio, error, message in (
        *((full, lean, ratio, UsageError, ratios) for ratio in (0, 1, "nan")),
        (full, place / "model", 0.5, UsageError, "got no classifier"),
        (other, lean, 0.5, UsageError, "got 'CoLA', expected SST-2"),
        (full, copied(lean, tmp_path / "without"), 0.5, CheckpointError, "expected predictions on holdout"),
        (full, turned, 0.5, CheckpointError, "items with other targets"),
    ):
        with pytest.raises(error, match=message):
            invoke(command, one, another, "--data-dir", place, "--cost-ratio", ratio)
