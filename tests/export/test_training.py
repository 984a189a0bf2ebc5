"""The trainer on every device of this machine, and its optimisers."""

import pytest
import torch
from msgspec.structs import replace

from export.papers.looped.model import PromptTransformer
from export.papers.looped.prompts import FUNCTION_CLASSES
from export.papers.looped.recipes import plan_of
from export.papers.looped.train import PromptObjective
from export.training.trainer import train

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def plan_for(name):
    return plan_of(name, "small", dim=16, steps=1)


def trained_one_step(device="cpu", name="linear", **changes):
    torch.manual_seed(0)
    plan = plan_for(name)
    model, stage = PromptTransformer(plan.config).to(device), plan.stages[0]
    before = {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}
    recipe = replace(stage.recipe, warmup_share=0.0, **changes)
    objective = PromptObjective(model, name, replace(stage, recipe=recipe, steps_per_epoch=1), seed=0)
    trained = train(objective, recipe, seed=0)
    return trained, {name: p.detach().cpu() - before[name] for name, p in model.named_parameters()}


@pytest.mark.parametrize(("name", "precision"), [("linear", "bf16"), *((name, "fp32") for name in FUNCTION_CLASSES)])
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
