"""The variants of paper 000's future work, and those that tell the benchmark as a loss from the data that it needs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, Literal

import msgspec

from export.papers.calculator.specs import SPECS
from export.training.recipe import OptimizerName, Recipe

#: ``half`` is one half of whole numbers and one of floats; ``both`` is all of both, twice as many items.
Data = Literal["whole", "floats", "half", "both", "dev"]
Loss = Literal["mse", "mae", "benchmark"]

FNN2 = "calculator-fnn2"
BASE = "as published"
ACTIVATIONS = ("prelu", "relu", "gelu", "silu", "tanh")
#: Weight decay and learning rates of optimisers by the name that people read. SGD has momentum.
OPTIMIZERS: dict[str, tuple[OptimizerName, float, tuple[float, ...]]] = {
    "Adam": ("adamw", 0.0, (1e-3, 3e-3, 1e-2)),
    "AdamW": ("adamw", 1e-2, (1e-3, 3e-3, 1e-2)),
    "SGD": ("sgd", 0.0, (3e-3, 1e-2, 3e-2)),
    "Muon": ("muon", 0.0, (1e-3, 3e-3, 1e-2)),
}
PRODUCT, DEV = "activation × optimiser", "dev data too"
#: Losses on the dev data: one to compare, and the one that it is compared with.
SQUARED, BENCHMARK = "squared error", "the benchmark"
_PRODUCT_SEEDS = 3
#: Units with which an embedding of 8 has about as many parameters as FNN2: 6,167.
_EMBEDDING, _FEWER_UNITS = 8, 50
#: Losses over plain and dev data stop later: the score that chooses the epoch is noisier than the validation error.
_DEV_PATIENCE = 20


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """A way to train a network.

    Attributes:
        factor: what it changes; variants of a factor are compared with one another.
        setting: what it changes it to.
        model: of :data:`export.papers.calculator.specs.SPECS`.
        arguments: of the network, beside those of its spec.
    """

    factor: str
    setting: str
    model: str = FNN2
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    recipe: Recipe
    data: Data = "whole"
    loss: Loss = "mse"

    @property
    def name(self) -> str:
        """Name of its files."""
        words = f"{self.model} {self.factor} {self.setting}".replace("×", "by")
        return "-".join("".join(char if char.isalnum() or char == "." else " " for char in words).split())

    def seeds(self, wanted: int) -> int:
        """Return the number of its runs where so many are wanted of each setting."""
        return min(wanted, _PRODUCT_SEEDS) if self.factor == PRODUCT else wanted


def variations() -> list[Variant]:
    """Return one factor at a time around FNN2, and the product of activations, optimisers and learning rates."""
    return [
        Variant(factor="base", setting=BASE, recipe=_recipe(FNN2)),
        *_around("dropout", {"0.1": {"dropout": 0.1}, "0.2": {"dropout": 0.2}, "0.5": {"dropout": 0.5}}),
        *_around("activation", {name: {"activation": name} for name in ACTIVATIONS[1:]}),
        *(
            Variant(factor="training data", setting=setting, recipe=_recipe(FNN2), data=data)
            for setting, data in _DATA.items()
        ),
        *_around("tokens", {"operators 0.75 and 0.25": {"tokens": "centred"}, "triples": {"tokens": "triples"}}),
        *_around("padding", {"zeros": {"padding": "zeros"}, "random offset": {"random_offset": True}}),
        *_around(
            "embedding",
            {
                f"of {_EMBEDDING}, 345 units": {"embedding": _EMBEDDING},
                f"of {_EMBEDDING}, {_FEWER_UNITS} units": {"embedding": _EMBEDDING, "units": [_FEWER_UNITS]},
            },
        ),
        *_product(),
    ]


def losses(model: str) -> list[Variant]:
    """Return a model trained as published, and on plain and dev data with three losses."""
    recipe = _recipe(model)
    longer = msgspec.structs.replace(recipe, patience=max(recipe.patience or 0, _DEV_PATIENCE))
    kinds: dict[str, Loss] = {SQUARED: "mse", "absolute error": "mae", BENCHMARK: "benchmark"}
    return [
        Variant(factor="base", setting=BASE, model=model, recipe=recipe),
        *(
            Variant(factor=DEV, setting=setting, model=model, recipe=longer, data="dev", loss=loss)
            for setting, loss in kinds.items()
        ),
    ]


_DATA: dict[str, Data] = {
    "floats": "floats",
    "half whole numbers, half floats": "half",
    "all whole numbers and floats": "both",
}


def _around(factor: str, settings: dict[str, dict[str, Any]]) -> Iterator[Variant]:
    for setting, arguments in settings.items():
        yield Variant(factor=factor, setting=setting, arguments=arguments, recipe=_recipe(FNN2))


def _product() -> Iterator[Variant]:
    for activation, (name, (optimizer, decay, rates)) in product(ACTIVATIONS, OPTIMIZERS.items()):
        for rate in rates:
            changed = {"optimizer": optimizer, "weight_decay": decay, "peak_learning_rate": rate}
            yield Variant(
                factor=PRODUCT,
                setting=f"{activation}, {name}, {rate:g}",
                arguments={"activation": activation},
                recipe=msgspec.structs.replace(_recipe(FNN2), **changed),
            )


def _recipe(model: str) -> Recipe:
    recipe = SPECS[model].recipe
    assert recipe is not None  # a network that is constructed has no variants
    return recipe
