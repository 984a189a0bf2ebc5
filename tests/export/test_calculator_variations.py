"""Other inputs, data, optimisers and losses of the calculators, and the experiments that compare them."""

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from edge.bundles.expression import tokenize
from edge.errors import UsageError
from export.errors import CheckpointError, TrainingError
from export.papers.calculator import generated
from export.papers.calculator.benchmark_loss import DevObjective, log_errors
from export.papers.calculator.bundle import export_run
from export.papers.calculator.networks import FeedForward, InputEncoding, create
from export.papers.calculator.run import calculator
from export.papers.calculator.train import CalculatorObjective, recipe_of, train_run
from export.papers.calculator.variations import cli
from export.papers.calculator.variations.grid import PRODUCT, losses, variations
from export.papers.calculator.variations.parts import Part, parts
from export.papers.calculator.variations.results import COLUMNS, results_of
from export.training.objective import SILENT
from export.training.optimizers import Optimizers
from export.training.recipe import Recipe
from export.training.trainer import train
from tests.support.task_data import invoke

FNN2 = "calculator-fnn2"
#: One setting of each kind that reads its input in another way.
READERS = ("centred", "triples", "zeros", "random_offset", "embedding")
ARGUMENTS = {
    "centred": {"tokens": "centred"},
    "triples": {"tokens": "triples", "positional_encoding": True},
    "zeros": {"padding": "zeros"},
    "random_offset": {"random_offset": True},
    "embedding": {"embedding": 4, "units": [8]},
}


def encoded(text, **arguments):
    return InputEncoding(**arguments).eval()(torch.from_numpy(tokenize([text])))[0].tolist()


def test_inputs_are_encoded_as_documented():
    assert encoded("3 - -4") == [3, 0, -4] + [0.5] * 12
    assert encoded("3 - -4", tokens="centred") == [3, 0.25, -4] + [0.5] * 12
    assert encoded("3 - -4", padding="zeros") == [3, 0, -4] + [0] * 12
    assert encoded("3 - -4", tokens="centred", padding="zeros") == [3, 0.25, -4] + [0] * 12
    triples = np.reshape(encoded("3 - -4", tokens="triples"), (8, 3))
    assert triples.tolist() == [[1, 3, 1], [-1, -4, 1]] + [[0, 0, 0]] * 6


def test_a_random_offset_moves_whole_expressions_in_training_alone():
    encoding, x = InputEncoding(random_offset=True), torch.from_numpy(tokenize(["3 - -4 + 2"] * 300))
    torch.manual_seed(0)
    moved = {tuple(row) for row in encoding(x).tolist()}
    assert moved == {(*[0.5] * 2 * first, 3, 0, -4, 1, 2, *[0.5] * (10 - 2 * first)) for first in range(6)}
    assert torch.equal(encoding.eval()(x), x)
    longest = torch.from_numpy(tokenize([" + ".join("12345678")]))
    assert torch.equal(encoding.train()(longest), longest)


@pytest.mark.parametrize("name", READERS)
def test_every_reader_trains_and_its_bundle_computes_the_same(name, tmp_path, monkeypatch):
    metrics = train_run(FNN2, tmp_path / "run", seed=0, epochs=1, arguments=ARGUMENTS[name])
    assert metrics.parameters == FeedForward(**{"units": [345], **ARGUMENTS[name]}).parameter_count
    exported = export_run(tmp_path / "run", tmp_path)  # raises if ONNX Runtime computes something else
    assert exported.files[0].largest_difference < 1e-4


def test_generated_data_share_nothing_with_what_networks_are_chosen_or_tested_by(splits):
    dev, floats = generated.dev(), generated.floats()
    new = [floats, *dev.learnt.values(), *dev.choice.values()]
    assert [len(split.expressions) for split in new] == [1907, 192, 375, 64, 125]
    known = {tuple(row) for name, split in splits.items() if name != "train" for row in split.tokens.tolist()}
    rows = [tuple(row) for split in new for row in split.tokens.tolist()]
    assert not known & {*rows}
    assert len({*rows}) == len(rows)
    assert np.abs(floats.tokens[:, :5:2]).max() <= 5
    operands = dev.learnt["out_of_range"].tokens[:, :5:2]
    assert {*np.unique(operands)} == {-10, -9, 9, 10}
    assert {*dev.learnt["long"].terms} == {*dev.choice["long"].terms} == {4, 5, 6, 7, 8}


def test_the_loss_is_the_logarithm_of_the_benchmarks_errors():
    truth = {"in_range": torch.zeros(2, 1), "out_of_range": torch.tensor([[4.0], [0.0]]), "long": torch.ones(1, 1)}
    values = {name: value + error for (name, value), error in zip(truth.items(), (0.5, 2.0, -3.0), strict=True)}
    relative = (2 / 4 + 2 / 1) / 2  # a value of 0 counts as 1
    assert log_errors(values, truth).item() == pytest.approx(np.log([0.5, 2, 3, relative]).mean())
    assert torch.isfinite(log_errors(truth, truth))


def test_losses_see_the_same_batches_and_resume_with_them(splits):
    made = {loss: DevObjective(create(FNN2, 0), splits, loss, seed=1) for loss in ("mse", "mae", "benchmark")}
    assert len({objective.fingerprint() for objective in made.values()}) == 3
    batches = list(made["mse"].batches(2, 0))
    assert {tuple(len(x) for x, _ in batch.values()) for batch in batches[:-1]} == {(32, 32, 32)}
    for objective in made.values():
        for batch, other in zip(batches[50:], objective.batches(2, 50), strict=True):
            assert batch.keys() == other.keys() == {"in_range", "out_of_range", "long"}
            for name, pair in batch.items():
                assert all(map(torch.equal, pair, other[name]))
    long = {tuple(row) for batch in batches for row in batch["long"][0].tolist()}
    assert long == {tuple(row) for row in generated.dev().learnt["long"].tokens.tolist()}


@pytest.mark.parametrize("loss", ["mse", "mae", "benchmark"])
def test_every_loss_reduces_the_errors_on_dev_items_that_are_not_learnt(loss, splits):
    objective = DevObjective(create(FNN2, 0), splits, loss, seed=0)
    before = objective.evaluate()
    train(objective, Recipe(epochs=4, peak_learning_rate=3e-3), seed=0)
    assert objective.evaluate().printed < 0.5 * before.printed


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_every_optimiser_learns(optimizer, splits):
    objective = CalculatorObjective(create(FNN2, 0), splits["train"], splits["val"], seed=0)
    before = objective.evaluate().printed
    train(objective, Recipe(epochs=4, peak_learning_rate=3e-3, optimizer=optimizer), seed=0)
    assert objective.evaluate().printed < 0.6 * before


def test_muon_has_all_matrices_but_the_last_of_a_dense_network_and_refuses_one_without(splits):
    recipe = Recipe(epochs=1, peak_learning_rate=1e-3, optimizer="muon")

    def by_muon(model):
        objective = CalculatorObjective(model, splits["train"], splits["val"], seed=0)
        _, state = Optimizers(objective, recipe).state_dict()
        return len(state["param_groups"][0]["params"])

    assert by_muon(create(FNN2, 0)) == 1
    assert by_muon(FeedForward(units=[4, 4, 4])) == 3
    with pytest.raises(TrainingError, match=r"muon: got a FeedForward without hidden matrices.*Take another optimizer"):
        by_muon(FeedForward(units=[]))


@pytest.fixture
def few(monkeypatch):
    """Some settings of every factor, for two epochs each."""
    first = {one.factor: one for one in reversed(variations())}
    product = [one for one in variations() if one.setting in ("relu, Muon, 0.01", "relu, SGD, 0.01")]
    kept = [one for factor, one in first.items() if factor != PRODUCT][::-1] + product
    short = [replace(one, recipe=replace(one.recipe, epochs=1)) for one in kept]
    monkeypatch.setattr(cli, "variations", lambda: short)
    return short


def vary(out, *options):
    return msgspec.json.decode(invoke(calculator, "vary", "--out", out, "--seeds", 2, "--json", *options))


def test_one_command_compares_all_settings_and_resumes(few, tmp_path):
    out = tmp_path / "out"
    printed = vary(out)
    assert printed == msgspec.json.decode((out / "results.json").read_bytes())
    assert [(row["factor"], row["setting"], row["seeds"]) for row in printed["rows"]] == [
        (one.factor, one.setting, 2) for one in few
    ]
    assert all(measure["seeds"] == 2 for row in printed["rows"] for measure in row["measures"])
    report = (out / "report.md").read_text()
    assert printed["verdict"] in report
    assert all(f"| {one.setting} |" in report for one in few if one.factor != PRODUCT)
    assert (out / "errors.png").read_bytes().startswith(b"\x89PNG")
    times = {path: path.stat().st_mtime_ns for path in (out / "parts").iterdir()}
    assert len(times) == 2 * len(few)
    lost = next(path for path in times if "embedding" in path.name)
    lost.unlink()
    again = vary(out, "--no-plots")
    assert [row["measures"] for row in again["rows"]] == [row["measures"] for row in printed["rows"]]
    assert {path for path in times if path.stat().st_mtime_ns != times[path]} == {lost}
    with pytest.raises(UsageError, match="got command vary, expected command benchmark-loss"):
        invoke(calculator, "benchmark-loss", "--out", out)
    lost.write_bytes(msgspec.json.encode(replace(msgspec.json.decode(lost.read_bytes(), type=Part), variant=few[0])))
    with pytest.raises(CheckpointError, match=r"got a part with other settings.*Delete it"):
        vary(out)


def test_the_benchmark_loss_has_a_control_with_the_same_data(monkeypatch, tmp_path):
    made = losses(FNN2)
    assert [(one.data, one.loss) for one in made] == [
        ("whole", "mse"),
        *(("dev", x) for x in ("mse", "mae", "benchmark")),
    ]
    assert len({one.recipe for one in made[1:]}) == 1
    short = [replace(one, recipe=replace(one.recipe, epochs=1)) for one in made]
    monkeypatch.setattr(cli, "losses", lambda model: short)
    found = msgspec.json.decode(invoke(calculator, "benchmark-loss", "--seeds", 1, "--out", tmp_path / "out", "--json"))
    assert [row["setting"] for row in found["rows"]] == [one.setting for one in short]
    mae = {
        row["setting"]: {m["split"]: m["value"] for m in row["measures"] if m["metric"] == "mae"}
        for row in found["rows"]
    }
    ours, squared = (mae[name]["long/4-8"] for name in ("the benchmark", "squared error"))
    assert f"MAE 4 to 8 terms {ours:.3g} ({squared:.3g})" in found["verdict"]
    assert found["chosen"] == {}
    dev = {m["split"]: m["n"] for m in found["rows"][1]["measures"] if " dev, " in m["split"]}
    assert dev == {
        "out_of_range dev, learnt": 192,
        "long dev, learnt": 375,
        "out_of_range dev, not learnt": 64,
        "long dev, not learnt": 125,
    }
    assert "| loss | out_of_range dev, learnt (192 items) |" in (tmp_path / "out/report.md").read_text()


def test_the_published_setting_is_trained_as_by_train(tmp_path):
    name = "calculator-baseline"  # which learns from a resample
    published = replace(losses(name)[0], recipe=recipe_of(name, epochs=1))
    (part,) = parts([published], 1, tmp_path, lambda what: SILENT)
    metrics = train_run(name, tmp_path / "run", seed=0, epochs=1)
    assert part.metrics.measures == metrics.measures


def made_part(variant, seed, errors, *, diverged=False):
    """Return a part whose errors on each split are given."""
    measures = tuple({"metric": metric, "split": split, "value": errors[split], "n": 1} for metric, split, _ in COLUMNS)
    metrics = {"parameters": 1, "epochs": 1, "best_epoch": 1, "seconds": 1.0, "measures": measures}
    part = {"variant": msgspec.to_builtins(variant), "seed": seed, "metrics": None if diverged else metrics}
    return msgspec.convert(part, Part)


def test_validation_chooses_and_a_setting_that_diverges_is_never_chosen():
    by_setting = {one.setting: one for one in variations()}

    def both(setting, val, test, **options):
        errors = {split: val if split == "val" else test for _, split, _ in COLUMNS}
        return [made_part(by_setting[setting], seed, errors, **options) for seed in range(2)]

    found = results_of(
        [
            *both("as published", 0.5, 0.1),
            *both("relu", 0.4, 0.9),
            *both("gelu", 0.3, 0.9, diverged=True),
            *both("zeros", 0.6, 0.01),
            *both("relu, SGD, 0.003", 0.2, 0.9),
            *both("relu, SGD, 0.01", 0.3, 0.01),
        ]
    )
    assert found.chosen == {"activation": "relu", "padding": "as published", PRODUCT: "relu, SGD, 0.003"}
    assert [row.setting for row in found.cells] == ["relu, SGD, 0.003"]
    assert "For padding it chooses as published. " in found.verdict
    assert "MAE in range 0.9 (0.1)" in found.verdict
    assert next(row for row in found.rows if row.setting == "gelu").diverged == 2
