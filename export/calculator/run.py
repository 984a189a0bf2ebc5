"""One training run from a model's name to its run directory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from export.attention import AdaptiveMode
from export.calculator.data import DESCRIPTION, load
from export.calculator.evaluate import evaluate, head_use
from export.calculator.models import Transformer4, create
from export.calculator.train import fit, recipe_of
from export.checkpoint import save
from export.processor import processor
from export.provenance import provenance
from export.runs import RunConfig, RunMetrics


def train_run(
    name: str,
    directory: str | Path,
    *,
    seed: int,
    epochs: int | None = None,
    adaptive: AdaptiveMode | None = None,
    on_epoch: Callable[[int, float], None] = lambda epoch, val_mae: None,
) -> RunMetrics:
    """Make a network, train it if it has something to learn, measure it, and write its run directory.

    Args:
        directory: path of the run; an earlier run there is replaced when this one is done.
        seed: of the initial weights and of the order of the items.
        epochs: at most so many; None is the recipe's number.
        adaptive: how the heads of a transformer shrink; None for plain attention and for other networks.

    Raises:
        TrainingError: the loss is no longer a finite number.
        CheckpointError: the run directory cannot be written.
    """
    arguments = {"adaptive": adaptive} if adaptive else {}
    model = create(name, seed, **arguments)
    splits = load()
    recipe = recipe_of(name, epochs=epochs, adaptive=adaptive)
    started = time.perf_counter()
    last_epoch = best_epoch = 0
    if recipe is not None:
        fitted = fit(model, recipe, splits["train"], splits["val"], seed=seed, on_epoch=on_epoch)
        last_epoch, best_epoch = fitted.epochs, fitted.best_epoch
    seconds = time.perf_counter() - started
    measures = evaluate(model.predict, splits)
    if isinstance(model, Transformer4) and model.adaptive:
        measures += head_use(model, splits)
    metrics = RunMetrics(model.parameter_count, last_epoch, best_epoch, seconds, measures)
    trained = f"AdamW, {recipe}" if recipe else "constructed, not trained"
    record = provenance(trainer=trained, data=DESCRIPTION, seed=seed if recipe else None)
    config = RunConfig(name, arguments, record, precision="fp32" if recipe else None, processor=processor())
    save(directory, model, config, metrics)
    return metrics
