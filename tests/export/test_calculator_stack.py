"""The stack calculator: a machine that is right by construction, its training, its refinement and its bundle."""

import re

import msgspec
import numpy as np
import pytest
import torch

from edge.bundles.arithmetic import CLOSE, MINUS, OPEN, OPERAND, PLUS, TIMES, evaluate
from edge.bundles.bundle import Bundle
from edge.runtimes.tensorrt.build import compile_onnx
from export.bundle.exportable import export_bundle
from export.models.convert import outputs_of
from export.papers.calculator.bundle import StackCalculator
from export.papers.calculator.stack import STACK
from export.papers.calculator.stack import train as stack_training
from export.papers.calculator.stack.data import DEPTHS, OPERANDS, SIZES, TEST_ITEMS, load
from export.papers.calculator.stack.data import evaluate as measure
from export.papers.calculator.stack.machine import POP, PUSH, STAY, Scan, StackFit, StackMachine, batch_of
from export.papers.calculator.stack.train import RECIPE, StackObjective
from export.training.checkpoint import load as load_run
from export.training.checkpoint import save
from export.training.provenance import provenance
from export.training.runs import RunConfig, RunMetrics
from export.training.trainer import train
from tests.support.commands import shown
from tests.support.marks import with_rtx
from tests.support.sample_requests import column
from tests.support.stock_client import served_bundles


@pytest.fixture(scope="module")
def splits():
    return load()


def constructed():
    """Return the machine whose register is a product, and whose cells are a sum and the factor of its next term."""
    machine = StackMachine()
    window = torch.eye(3, dtype=torch.float64)
    added, taken = torch.tensor([[[0, 0, 1], [1, 1, 0], [0, 0, 1]], [[0, 0, -1], [1, 1, 0], [0, 0, 1]]]).double()
    closed = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 0, 0]]).double()
    maps = {OPERAND: window.clone(), PLUS: added, MINUS: taken, TIMES: window, OPEN: window, CLOSE: closed}
    maps[OPERAND][0, 0] = 0
    with torch.no_grad():
        machine.update.copy_(torch.stack([maps[kind] for kind in sorted(maps)])[None])
        machine.scale[0, 0, 0] = 1
        machine.new_cell[0, OPEN - 1, 1, 0] = 1
        machine.moves[0, :, STAY] = 1
        machine.moves[0, OPEN - 1, PUSH] = machine.moves[0, CLOSE - 1, POP] = 2
        machine.start.copy_(torch.tensor([[1.0, 0, 1]]))
        machine.readout.copy_(torch.tensor([[1.0, 1, 0]]))
    machine.choose_moves()
    return machine


def test_splits_are_what_they_are_called(splits):
    for name, split in splits.items():
        numbers = [len(re.findall(r"\d+(?:\.\d+)?", text)) for text in split.expressions]
        depths = [max(np.cumsum([(char == "(") - (char == ")") for char in text])) for text in split.expressions]
        if name in SIZES:
            assert (len(numbers), min(numbers), max(numbers), max(depths)) == (SIZES[name], 1, 4, 2)
        elif name.startswith("operands/"):
            assert {*numbers} == {int(name.partition("/")[2])}
        elif name.startswith("depth/"):
            assert {*depths} == {int(name.partition("/")[2])}
        assert name == "paper/long" or len({*split.expressions}) == len(split.expressions)
    assert {f"operands/{count}" for count in OPERANDS} | {f"depth/{depth}" for depth in DEPTHS} < {*splits}
    trained = {*splits["train"].expressions}
    assert not any(trained & {*split.expressions} for name, split in splits.items() if name != "train")


def test_constructed_machine_is_exact_step_by_step_and_as_a_scan(splits):
    machine = constructed()
    for split in splits.values():
        answers = machine(torch.from_numpy(split.kinds), torch.from_numpy(split.values).double().round(decimals=6))[0]
        np.testing.assert_allclose(answers.detach().numpy(), split.truth, rtol=1e-12, atol=1e-10)
    found = {(each.metric, each.split): each for each in measure(Scan(machine), splits)}
    assert {each.value for (metric, _), each in found.items() if metric == "right"} == {1.0}
    assert found["largest_relative_error", "products of 8"].value == 0
    assert found["right", "depth/7"].n == TEST_ITEMS


def test_scan_of_any_machine_is_its_sequence_of_steps(splits):
    machines = StackMachine(2, torch.Generator().manual_seed(0))
    split = splits["depth/3"]
    kinds, values = torch.from_numpy(split.kinds[:50]), torch.from_numpy(split.values[:50])
    sequential = machines(kinds, values.double())
    for restart in range(2):
        found = Scan(machines.select(restart))(kinds, values)[:, 0]
        torch.testing.assert_close(found.double(), sequential[restart], rtol=1e-3, atol=1e-3)


def test_training_lowers_the_loss_of_every_machine(splits):
    recipe = msgspec.structs.replace(RECIPE, epochs=3, batch_size=64)
    machines = StackMachine(2, torch.Generator().manual_seed(0))
    objective = StackObjective(machines, splits["train"], splits["val"], seed=0, recipe=recipe)
    before = objective.validation_losses()
    train(objective, recipe, seed=0)
    assert (objective.validation_losses() < 0.8 * before).all()
    assert (objective.eligible(0) <= objective.eligible(2)).all()
    assert objective.eligible(0).sum() < objective.eligible(2).sum()


def test_refinement_makes_a_disturbed_machine_exact_with_simple_weights(splits):
    machine = constructed()
    with torch.no_grad():
        for name in ("scale", "start", "readout"):
            tensor = getattr(machine, name)
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    items = batch_of(splits["train"])
    items = type(items)(*(tensor[:80] for tensor in items))
    fit = StackFit(machine, items)
    assert fit.free.all()
    fit.free = (
        fit.weights != StackFit(constructed(), items).weights
    )  # each weight that is free takes a tenth of a second
    assert fit.error > 1e-3
    assert fit.solve()
    fit.snap()
    assert not fit.free.any()
    assert (fit.weights * 8 % 1 == 0).all()
    assert sum(weight in (0.0, 1.0, -1.0) for weight in fit.weights.tolist()) > 80
    tests = {name: splits[name] for name in ("operands/32", "depth/7", "products of 8")}
    right = {each.value for each in measure(Scan(fit.written()), tests) if each.metric == "right"}
    assert right == {1.0}


def test_machine_with_wrong_moves_does_not_become_exact(splits):
    machine = constructed()
    with torch.no_grad():
        machine.moves[0, CLOSE - 1] = machine.moves[0, PLUS - 1]  # parentheses that never end
    items = batch_of(splits["train"])
    fit = StackFit(machine, type(items)(*(tensor[:160] for tensor in items)))
    assert not fit.solve()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """Return the bundle of the constructed machine."""
    root = tmp_path_factory.mktemp("stack")
    config = RunConfig(STACK, {}, provenance(trainer="constructed", data="none", seed=None))
    save(root / STACK, constructed(), config, RunMetrics(123, 0, 0, 0.0, ()))
    exported = export_bundle(StackCalculator(root / STACK), root / "repository", on_rows=lambda *counted: None)
    assert exported.files[0].largest_difference < 1e-5
    return Bundle.open(exported.bundle)


def test_bundle_has_the_measures_of_its_graph(bundle):
    right = {each.split: each for each in bundle.manifest.measures if each.metric == "right"}
    assert right["operands/32"].value == 1
    assert bundle.golden.rows > 50
    texts = [text.decode() for text in bundle.golden.raw["expression"][:, 0]]
    truth = np.array([evaluate(text) for text in texts])
    np.testing.assert_allclose(bundle.golden.outputs["value"][:, 0], truth, rtol=1e-5, atol=1e-5)
    # A run has rows of several clients, and must not fail because of one of them.
    beyond = {"kinds": np.full((1, 64), 10**6), "values": np.ones((1, 64), np.float32)}
    assert np.isfinite(outputs_of(bundle.read("model.onnx"), beyond, "model")["value"]).all()


@pytest.mark.slow
def test_commands_train_and_export_what_is_served(splits, tmp_path, monkeypatch):
    monkeypatch.setattr(stack_training, "RESTARTS", 2)
    monkeypatch.setattr(stack_training, "ROUNDS", 1)
    shown("train", STACK, "--epochs=1", "--out", tmp_path / "runs")
    shown("export", tmp_path / "runs" / STACK, "--repository", tmp_path / "repository")
    measures = Bundle.open(tmp_path / f"repository/{STACK}-1").manifest.measures
    assert {"exact_restarts", "right"} <= {each.metric for each in measures}
    split, (model, *_) = splits["val"], load_run(tmp_path / "runs" / STACK, {STACK: StackMachine})
    with served_bundles([tmp_path / f"repository/{STACK}-1"], tmp_path / "cache") as ask, torch.no_grad():
        found = ask(STACK, {"expression": column(*split.expressions[:100])})["value"]
        want = Scan(model)(*(torch.from_numpy(each[:100]) for each in (split.kinds, split.values)))
    np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-3)


@with_rtx
def test_graph_compiles_with_tensorrt(bundle):
    model = bundle.read("model.onnx")
    made = compile_onnx(
        model, bundle.manifest.profile, flavor="tensorrt_rtx", compute_capability="SM86", subject="model"
    )
    assert len(made.data) > 10_000
