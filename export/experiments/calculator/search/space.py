"""What is searched for each network, and how many trials paper 000 spent on it; without torch and Optuna."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from export.papers.calculator.specs import SPECS
from export.training.recipe import Recipe

#: Epochs of a trial at most, as in paper 000.
EPOCHS = 100


class Trial(Protocol):
    """The part of Optuna's trial by which a space asks for values."""

    def suggest_int(self, name: str, low: int, high: int, *, log: bool = ...) -> int:
        """Return a whole number between two bounds, both included."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = ...) -> float:
        """Return a number between two bounds."""

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        """Return one of some values."""


class Proposal(msgspec.Struct, frozen=True):
    """A network and its training: arguments beside those of the spec, and a recipe."""

    arguments: dict[str, Any]
    recipe: Recipe


class Space(NamedTuple):
    """A space: its function and the number of trials by default."""

    propose: Callable[[Trial], tuple[dict[str, Any], dict[str, Any]]]
    trials: int


def propose(model: str, trial: Trial) -> Proposal:
    """Return what a trial of a model is to train; the recipe is that of the model but for what is searched."""
    arguments, changes = SPACES[model].propose(trial)
    recipe = SPECS[model].recipe
    assert recipe is not None  # a network that is constructed has no space
    return Proposal(arguments, msgspec.structs.replace(recipe, epochs=EPOCHS, **changes))


def _feed_forward(trial: Trial) -> tuple[dict[str, Any], dict[str, Any]]:
    """Propose as paper 000's search did: 1 to 16 layers of 1 to 512 units each, and dropout of 0.1 or none."""
    layers = trial.suggest_int("layers", 1, 16)
    units = [trial.suggest_int(f"units {layer}", 1, 512) for layer in range(1, layers + 1)]
    return {"units": units, "dropout": trial.suggest_categorical("dropout", [0.0, 0.1])}, {}


def _recurrent(trial: Trial) -> tuple[dict[str, Any], dict[str, Any]]:
    """Propose as paper 000's search did, but for the number of layers, which is two, with equal units."""
    return {"units": trial.suggest_int("units", 1, 512)}, {}


def _attentive(trial: Trial) -> tuple[dict[str, Any], dict[str, Any]]:
    rate = trial.suggest_float("learning rate", 3e-4, 1e-2, log=True)
    return {"units": trial.suggest_int("units", 8, 128, log=True)}, {"peak_learning_rate": rate}


def _transformer(trial: Trial) -> tuple[dict[str, Any], dict[str, Any]]:
    heads = trial.suggest_categorical("heads", [2, 4, 8])
    arguments = {
        "num_heads": heads,
        "dim": heads * trial.suggest_categorical("head dim", [4, 8, 16]),
        "num_layers": trial.suggest_int("layers", 1, 4),
        "hidden": trial.suggest_int("hidden", 32, 512, log=True),
    }
    return arguments, {"peak_learning_rate": trial.suggest_float("learning rate", 3e-4, 3e-3, log=True)}


#: Paper 000's spaces and budgets for fnn2, fnn3 and rnn2. It gives none for the others, so those are small.
SPACES = {
    "calculator-fnn2": Space(_feed_forward, 100),
    "calculator-fnn3": Space(_feed_forward, 50),
    "calculator-rnn2": Space(_recurrent, 20),
    "calculator-lstm": Space(_attentive, 20),
    "calculator-bilstm": Space(_attentive, 20),
    "calculator-gru": Space(_attentive, 20),
    "calculator-transformer4": Space(_transformer, 20),
}
