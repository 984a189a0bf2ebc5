"""The optimisers of a recipe: AdamW for all parameters, or Muon for the layers' matrices and AdamW for the rest.

Muon makes the update of a matrix orthogonal (Jordan et al. 2024, kellerjordan.github.io/posts/muon). Its step is scaled
to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982), so one learning rate serves both.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from edge.errors import Raw
from export.errors import TrainingError
from export.training.objective import Objective
from export.training.recipe import Recipe


class Optimizers:
    """The optimisers of one training."""

    def __init__(self, objective: Objective, recipe: Recipe) -> None:
        hidden = _hidden_matrices(objective) if recipe.optimizer == "muon" else []
        rate = recipe.peak_learning_rate
        groups = _groups(objective, recipe, {*hidden})
        self._all: list[Optimizer] = [AdamW(groups, lr=rate, betas=recipe.betas, eps=recipe.eps, fused=True)]
        if hidden:
            group = {"params": hidden, "weight_decay": recipe.weight_decay, "multiple": 1.0}
            self._all.append(Muon([group], lr=rate, adjust_lr_fn="match_rms_adamw"))

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for optimizer in self._all:
            optimizer.zero_grad()

    def step(self, rate: float) -> None:
        """Update the parameters with a learning rate."""
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["multiple"]
            optimizer.step()

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of the optimisers, for :meth:`load_state_dict`."""
        return [optimizer.state_dict() for optimizer in self._all]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Restore the states of the same recipe's optimisers."""
        for optimizer, state in zip(self._all, states, strict=True):
            optimizer.load_state_dict(state)


def _hidden_matrices(objective: Objective) -> list[nn.Parameter]:
    """Return the matrices of the model's lists of layers, which leaves out embeddings, read-in and read-out.

    A model without such lists is a sequence of dense layers: all their matrices but the last, the read-out.

    Raises:
        TrainingError: it has none.
    """
    modules = list(objective.model.modules())
    lists = [module for module in modules if isinstance(module, nn.ModuleList)]
    if lists:
        parameters = {p: None for module in lists for p in module.parameters() if p.dim() == 2 and p.requires_grad}
        matrices = [parameter for parameter in parameters if parameter not in objective.rates]
    else:
        sequence = next((module for module in modules if isinstance(module, nn.Sequential)), nn.Sequential())
        matrices = [p for p in sequence.parameters() if p.dim() == 2][:-1]
    if not matrices:
        given = Raw(f"a {type(objective.model).__name__} without hidden matrices")
        raise TrainingError("muon", given=given, expected="matrices of hidden layers", fix="Take another optimizer.")
    return matrices


def _groups(objective: Objective, recipe: Recipe, left_out: set[nn.Parameter]) -> list[dict[str, Any]]:
    """Return AdamW's groups, each with its ``multiple`` of the recipe's learning rate."""
    rates = objective.rates
    usual = [p for p in objective.model.parameters() if p.requires_grad and p not in rates and p not in left_out]
    decayed = [p for p in usual if recipe.decays == "all" or p.dim() > 1]
    others = [p for p in usual if recipe.decays != "all" and p.dim() <= 1]
    return [
        {"params": decayed, "weight_decay": recipe.weight_decay, "multiple": 1.0},
        {"params": others, "weight_decay": 0.0, "multiple": 1.0},
        *(
            {"params": [p for p in rates if rates[p] == rate], "weight_decay": 0.0, "multiple": rate}
            for rate in sorted({*rates.values()})
        ),
    ]
