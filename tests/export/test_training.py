"""The trainer on every device of this machine, its optimisers, the intervals of measures, and run directories."""

import re
import shutil

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch
from msgspec.structs import replace

from edge.bundles.manifest import Measure
from export.errors import CheckpointError
from export.papers.calculator.networks import NETWORKS
from export.papers.looped.model import PromptTransformer
from export.papers.looped.options import LoopedOptions
from export.papers.looped.recipes import training_plan
from export.papers.looped.train import PromptObjective
from export.report.table import cell_text
from export.training.average import AveragedWeights
from export.training.checkpoint import load, save
from export.training.intervals import Mean, Sample, across_seeds, average, mean_measure, percent, with_interval
from export.training.runs import CARD, CONFIG, METRICS, WEIGHTS
from export.training.trainer import train

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def plan_for(name):
    return training_plan(name, LoopedOptions(dim=16, steps=1))


def trained_one_step(device="cpu", name="linear", **changes):
    torch.manual_seed(0)
    plan = plan_for(name)
    model, stage = PromptTransformer(plan.config).to(device), plan.stages[0]
    before = {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}
    recipe = replace(stage.recipe, warmup_share=0.0, **changes)
    objective = PromptObjective(model, name, replace(stage, recipe=recipe, steps_per_epoch=1), seed=0)
    trained = train(objective, recipe, seed=0)
    return trained, {name: p.detach().cpu() - before[name] for name, p in model.named_parameters()}


@pytest.mark.parametrize(("name", "precision"), [("linear", "bf16"), ("tree", "fp32")])
@pytest.mark.parametrize("device", DEVICES)
def test_one_step_on_every_device(device, name, precision):
    expected, _ = trained_one_step(name=name)
    found, changes = trained_one_step(device, name, precision=precision)
    assert found.losses == pytest.approx(expected.losses, rel=1e-4 if precision == "fp32" else 0.02)
    assert all(change.abs().max() > 0 for change in changes.values())


def test_muon_updates_the_matrices_of_layers_and_adamw_the_rest():
    _, muon = trained_one_step(optimizer="muon")
    _, adamw = trained_one_step(optimizer="adamw")
    matrices = {name for name, change in muon.items() if name.startswith("layers.") and change.dim() == 2}
    assert len(matrices) == 6
    rate = plan_for("linear").stages[0].recipe.peak_learning_rate
    for name in matrices:  # every direction of an update is equally large: 1 before it is scaled to AdamW's size
        largest = torch.linalg.matrix_norm(muon[name], 2).item() / (0.2 * rate * max(muon[name].shape) ** 0.5)
        assert largest == pytest.approx(1, abs=0.35)
        assert torch.linalg.matrix_norm(adamw[name], 2) > 1.5 * torch.linalg.matrix_norm(muon[name], 2)
    for name in muon.keys() - matrices:
        torch.testing.assert_close(muon[name], adamw[name])


def test_the_average_of_weights_fades_goes_on_from_its_state_and_leaves_the_weights_as_they_were():
    weights = [torch.nn.Parameter(torch.full((2,), 8.0)), torch.nn.Parameter(torch.full((3,), -8.0))]
    average, value, resumed = AveragedWeights(weights, 0.15), 8.0, None
    for step, weight in enumerate((1.0, 0.3, -2.0, 5.0), 1):
        with torch.no_grad():
            weights[0].fill_(weight)
            weights[1].fill_(-weight)
        if step == 3:  # what was saved before two steps goes on to the same bits
            resumed = AveragedWeights(weights, 0.15)
            resumed.load_state_dict({"step": 2, "average": [each.clone() for each in average.state_dict()["average"]]})
        for each in (average, resumed) if resumed else (average,):
            each.update()
        kept = min(0.15, step / (step + 10))  # 1 / 11 and 0.15
        value = kept * value + (1 - kept) * weight
    for each in (average, resumed):
        with each.in_place():
            assert weights[0].tolist() == pytest.approx([value] * 2)
            assert weights[1].tolist() == pytest.approx([-value] * 3)
        assert weights[0].tolist() == [5.0] * 2
    for ours, theirs in zip(average.state_dict()["average"], resumed.state_dict()["average"], strict=True):
        assert torch.equal(ours, theirs)


def test_intervals_of_averages_over_tasks_and_few_seeds_cover_the_truth():
    """With a true difference of 0, 95 % of the intervals should have it; resampling three seeds gives 72 to 86 %."""
    random, covered, simulations, item_noise, seed_noise = np.random.default_rng(0), 0, 250, 0.2, 0.1
    items, tasks = 200, 4
    for _ in range(simulations):
        found = []
        for task in range(tasks):
            seeds = (3, 5)[task % 2]
            values = (
                random.normal(scale=item_noise, size=items)  # that all seeds share
                + random.normal(scale=item_noise, size=(seeds, items))
                + random.normal(scale=seed_noise, size=(seeds, 1))
            )
            shares = random.multinomial(items, [1 / items] * items, size=200) / items
            found.append(Sample(values.mean(axis=1), shares @ values.mean(axis=0)))
        low, high = average(found).interval
        covered += low <= 0 <= high
    assert 0.93 <= covered / simulations <= 0.995


def test_resamples_and_seeds_that_agree_leave_the_interval_over_items_or_none():
    one_cosine, right = mean_measure("cosine", "holdout", np.array([0.97])), mean_measure("right", "dev", np.ones(24))
    assert (one_cosine.value, one_cosine.interval, one_cosine.n) == (0.97, None, 1)
    assert with_interval(one_cosine.value, one_cosine.interval, str) == "0.97"
    wilson = (pytest.approx(24 / (24 + 1.96**2), rel=1e-4), 1)
    assert right.interval == wilson
    (pooled,) = across_seeds([(right,), (right,), (right,)])
    assert (pooled.value, pooled.seeds, pooled.interval) == (1, 3, wilson)
    (differing,) = across_seeds([(right,), (Measure("right", "dev", 0.5, 24),)])
    assert differing.interval[0] < 0.5


def test_means_have_four_digits_at_most_and_intervals_of_shares_end_at_100_percent():
    for mean, text in (
        (Mean(978873.07541, (978873.0754, 978873.0755)), "9.789e+05 (9.789e+05 … 9.789e+05)"),
        (Mean(5.12e-8, (-2.9e-9, 9.99e-8)), "5.1e-08 (-3e-09 … 1e-07)"),
        (Mean(0.86996, (0.86929, 0.87063)), "0.8700 (0.8693 … 0.8706)"),
        (percent(Mean(1, (0.99813, 1))), "100.00 (99.81 … 100.00)"),
        (percent(Mean(0.91, (0.8, 1.03))), "91 (80 … 100)"),
        (percent(Mean(0.02, (-0.01, 0.05))), "2.0 (0.0 … 5.0)"),
    ):
        assert cell_text(mean) == text


@pytest.fixture
def run(runs, tmp_path):
    return shutil.copytree(runs / "calculator-gate", tmp_path / "calculator-gate")


def test_a_run_is_read_as_it_was_written_and_replaced_whole(run, tmp_path):
    model, config, metrics = load(run, NETWORKS)
    for directory in (tmp_path / "deep" / "copy", run):
        save(directory, model, config, metrics)
        again, *rest = load(directory, NETWORKS)
        assert rest == [config, metrics]
        assert not again.training
        assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
        assert sorted(path.name for path in directory.iterdir()) == sorted([CARD, CONFIG, METRICS, WEIGHTS])
        assert not [path for path in directory.parent.iterdir() if path.name.startswith(".")]
    assert (config.provenance.seed, config.provenance.versions["torch"]) == (0, torch.__version__)
    assert config.provenance.created.endswith("+00:00")
    assert "epochs=20" in config.provenance.trainer
    assert config.precision == "fp32"


def test_a_run_replaces_nothing_else(run, tmp_path):
    loaded = load(run, NETWORKS)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(CheckpointError, match=r"photos: got something that is not a run, .* Choose another --out"):
        save(tmp_path / "photos", *loaded)
    with pytest.raises(CheckpointError, match="expected a writable place"):
        save(tmp_path / "photos" / "cat.jpg" / "run", *loaded)
    assert (tmp_path / "photos" / "cat.jpg").read_bytes() == b""


def configured(**changes):
    def change(run):
        fields = msgspec.json.decode((run / CONFIG).read_bytes())
        (run / CONFIG).write_bytes(msgspec.json.encode({**fields, **changes}))

    return change


def weighted(**changes):
    """Replace tensors of a run by name; None removes one."""

    def change(run):
        weights = {**safetensors.torch.load_file(run / WEIGHTS), **changes}
        safetensors.torch.save_file({name: t for name, t in weights.items() if t is not None}, run / WEIGHTS)

    return change


def written(name, data):
    """Write a file of a run; None deletes it."""
    return lambda run: (run / name).unlink() if data is None else (run / name).write_bytes(data)


BIAS = "value.bias"
BROKEN = [
    (shutil.rmtree, "got nothing there, expected a run directory"),
    (lambda run: (shutil.rmtree(run), run.touch()), "got a file, expected a run directory"),
    *((written(n, None), f"{n}: got No such file or directory, expected a file") for n in (WEIGHTS, METRICS)),
    (written(CONFIG, None), f"run .*: got a directory without {CONFIG}, expected a run directory"),
    (written(CONFIG, b""), f"{CONFIG}: got .*, expected the fields of Run"),
    (written(METRICS, b'{"model": 3}'), f"{METRICS}: got .*, expected the fields of Run"),
    (configured(model="calculator-abacus"), "field model: got 'calculator-abacus', expected one of calculator-oracle"),
    (configured(arguments={"heads": 3}), "field arguments: got .*heads.*expected the arguments of calculator-gate"),
    (written(WEIGHTS, b"no weights"), "expected a safetensors file"),
    (weighted(**{BIAS: torch.zeros(2)}), rf"'{BIAS}': got torch.float32 \[2\], expected torch.float32 \[1\]"),
    (weighted(**{BIAS: torch.zeros(1).double()}), rf"'{BIAS}': got torch.float64 \[1\], expected torch.float32 \[1\]"),
    (weighted(**{BIAS: None}), f"tensor '{BIAS}': got no such tensor"),
    (weighted(extra=torch.zeros(1)), "'extra': got a tensor that the model lacks"),
    (weighted(**{BIAS: torch.tensor([torch.nan])}), f"'{BIAS}': got NaN or Inf, expected finite weights"),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN, ids=[re.sub(r"\W+", "-", message) for _, message in BROKEN])
def test_broken_runs_are_rejected(run, damage, message):
    damage(run)
    with pytest.raises(CheckpointError, match=message):
        load(run, NETWORKS)
