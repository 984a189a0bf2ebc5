"""Training: one loop for every network, the recipe of each, and run directories."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from export.attention import AdaptiveMode, adaptive_loss, adaptive_weight
from export.calculator.data import DESCRIPTION, Split, load
from export.calculator.evaluate import evaluate, head_use
from export.calculator.models import Regressor, Transformer4, create
from export.checkpoint import save
from export.errors import TrainingError
from export.processor import processor
from export.provenance import provenance
from export.runs import RunConfig, RunMetrics


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a training.

    Attributes:
        peak_learning_rate: after the warm-up.
        patience: epochs without a fall of the validation loss by ``min_delta`` until the training stops.
        min_delta: in units of the loss.
        weight_decay: decoupled (AdamW); 0 is plain Adam.
        clip_norm: the largest norm of one tensor's gradient, as Keras' ``clipnorm`` has it; None does not clip.
        warmup_share: the share of all steps in which the learning rate rises from 0.
        final_share: the learning rate falls along a cosine to this share of its peak; 1 keeps it constant.
    """

    epochs: int
    peak_learning_rate: float
    patience: int
    min_delta: float = 0.0
    batch_size: int = 32
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip_norm: float | None = None
    warmup_share: float = 0.0
    final_share: float = 1.0


#: Paper 000's, from its public code; the oracle has nothing to train.
RECIPES = {
    "calculator-gate": Recipe(epochs=200, peak_learning_rate=1e-2, patience=10),
    "calculator-fnn2": Recipe(epochs=200, peak_learning_rate=1e-3, patience=10, min_delta=1e-4),
    "calculator-transformer4": Recipe(
        epochs=200,
        peak_learning_rate=1.4189e-3,
        patience=20,
        betas=(0.85, 0.999),
        weight_decay=4e-3,
        clip_norm=1.0,
        warmup_share=21 / 200,
        final_share=0.1,
    ),
}


class Fitted(msgspec.Struct, frozen=True):
    """Result of a training: epochs until it stopped, the best of them, its validation loss (MSE), and seconds."""

    epochs: int
    best_epoch: int
    val_loss: float
    seconds: float


def recipe_of(name: str, *, epochs: int | None = None, adaptive: AdaptiveMode | None = None) -> Recipe | None:
    """Return the recipe of a model; None for one without training.

    Args:
        epochs: the maximum; None is that of :data:`RECIPES`.
        adaptive: how its heads shrink. Such a run does not stop early: lambda rises in the last 5 % of the steps.
    """
    if name not in RECIPES:
        return None
    recipe = RECIPES[name]
    if epochs is not None:
        recipe = msgspec.structs.replace(recipe, epochs=epochs)
    return msgspec.structs.replace(recipe, patience=recipe.epochs) if adaptive else recipe


def fit(
    model: Regressor,
    recipe: Recipe,
    train: Split,
    val: Split,
    *,
    seed: int,
    on_epoch: Callable[[int, float], None] = lambda epoch, val_mae: None,
) -> Fitted:
    """Train a network in place, and leave it with the best weights on ``val``.

    Args:
        val: decides when to stop and which weights to keep; it is not learnt from.
        seed: of the order of the items.
        on_epoch: called after each epoch with its number, from 1, and the mean absolute error on ``val``.

    Raises:
        TrainingError: the loss is no longer a finite number.
    """
    started = time.perf_counter()
    x, y = torch.from_numpy(train.tokens), torch.from_numpy(train.truth)[:, None]
    generator = torch.Generator().manual_seed(seed)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=recipe.peak_learning_rate,
        betas=recipe.betas,
        eps=1e-7,  # Keras' default, as in the original
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    steps = recipe.epochs * math.ceil(len(x) / recipe.batch_size)
    step = 0
    best_loss, best_epoch, best_weights = math.inf, 0, model.state_dict()
    for epoch in range(1, recipe.epochs + 1):
        model.train()
        total_loss = torch.zeros(())
        for batch in torch.split(torch.randperm(len(x), generator=generator), recipe.batch_size):
            optimizer.param_groups[0]["lr"] = learning_rate(recipe, step / steps)
            loss = _loss(model, x[batch], y[batch], step / steps)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if recipe.clip_norm is not None:
                _clip_each(parameters, recipe.clip_norm)
            optimizer.step()
            total_loss += loss.detach()
            step += 1
        errors = torch.from_numpy(model.predict(val.tokens)[:, 0] - val.truth)
        val_loss = float(errors.square().mean())
        _check_finite(epoch, float(total_loss), val_loss)
        on_epoch(epoch, float(errors.abs().mean()))
        if val_loss < best_loss - recipe.min_delta:
            best_loss, best_epoch, best_weights = val_loss, epoch, copy.deepcopy(model.state_dict())
        elif epoch - best_epoch >= recipe.patience:
            break
    model.load_state_dict(best_weights)
    model.eval()
    return Fitted(epoch, best_epoch, best_loss, time.perf_counter() - started)


def learning_rate(recipe: Recipe, progress: float) -> float:
    """Return the learning rate after a share ``progress`` of all steps: linear warm-up, then a cosine."""
    if progress < recipe.warmup_share:
        return recipe.peak_learning_rate * progress / recipe.warmup_share
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - recipe.warmup_share) / (1 - recipe.warmup_share)))
    return recipe.peak_learning_rate * (recipe.final_share + (1 - recipe.final_share) * cosine)


def _loss(model: Regressor, x: Tensor, y: Tensor, progress: float) -> Tensor:
    value, scores = model.scored(x)
    task = functional.mse_loss(value, y)
    if model.adaptive is None:
        return task
    return task + adaptive_weight(progress) * adaptive_loss(scores, model.adaptive)


def _clip_each(parameters: list[torch.nn.Parameter], largest_norm: float) -> None:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # The list forms of norm and multiplication: one call for dozens of small tensors, a tenth of a step less.
    norms = torch.stack(torch._foreach_norm(gradients))
    torch._foreach_mul_(gradients, (largest_norm / norms.clamp(min=largest_norm)).unbind())


def _check_finite(epoch: int, train_loss: float, val_loss: float) -> None:
    for subject, loss in (("training", train_loss), ("validation", val_loss)):
        if not math.isfinite(loss):
            fix = "Train again with another --seed, or with a lower learning rate in its recipe."
            raise TrainingError(f"{subject} loss in epoch {epoch}", given=loss, expected="a finite number", fix=fix)


def train_run(
    name: str,
    directory: str | Path,
    *,
    seed: int,
    epochs: int | None = None,
    adaptive: AdaptiveMode | None = None,
    on_epoch: Callable[[int, float], None] = lambda epoch, val_mae: None,
) -> RunMetrics:
    """Make a network, train it unless it is constructed, evaluate it, and write its run directory.

    Args:
        directory: path of the run; an earlier run there is replaced when this one is done.
        seed: of the initial weights and of the order of the items.
        epochs: the maximum; None is the recipe's.
        adaptive: how the heads of a transformer shrink; None for plain attention and for other networks.

    Raises:
        TrainingError: the loss is no longer a finite number.
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
