"""The parts of the experiments: a variant trained with a seed and measured, in a file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from edge.bundles.manifest import Measure
from edge.errors import Raw
from edge.files import write_whole
from export.errors import CheckpointError, TrainingError
from export.papers.calculator.benchmark_loss import DevObjective
from export.papers.calculator.data import Split, load
from export.papers.calculator.generated import dev, floats
from export.papers.calculator.networks import Regressor, create
from export.papers.calculator.train import CalculatorObjective, learnt_items, metrics_of
from export.papers.calculator.variations.grid import PRODUCT, Variant
from export.papers.experiment import Before, read_part
from export.training.objective import Objective, Observer
from export.training.runs import RunMetrics
from export.training.trainer import train

PARTS = "parts"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A variant that was trained with a seed; ``metrics`` are None if its loss grew beyond all numbers."""

    variant: Variant
    seed: int
    metrics: RunMetrics | None


def parts(variants: Sequence[Variant], seeds: int, out: Path, before: Before) -> Iterator[Part]:
    """Yield all parts, computing those that have no file yet; one factor at a time before the product.

    Raises:
        CheckpointError: a file is malformed, or of other settings.
    """
    splits = load()
    for product in (False, True):
        of_kind = [variant for variant in variants if (variant.factor == PRODUCT) is product]
        for seed, variant in itertools.product(range(seeds), of_kind):
            if seed >= variant.seeds(seeds):
                continue
            path = out / PARTS / f"{variant.name}-seed{seed}.json"
            if path.exists():
                part = read_part(path, Part)
                if part.variant != variant:
                    given, fix = Raw("a part with other settings"), "Delete it, and give the same command."
                    raise CheckpointError(f"{path}", given=given, expected=f"a part with {variant}", fix=fix)
            else:
                part = _computed(variant, seed, splits, before(f"{variant.factor}: {variant.setting}, seed {seed}"))
                write_whole(path, msgspec.json.encode(part))
            yield part


def _computed(variant: Variant, seed: int, splits: Mapping[str, Split], watch: Observer) -> Part:
    model = create(variant.model, seed, **variant.arguments)
    batch_size, whole = variant.recipe.batch_size, learnt_items(variant.model, splits, seed)
    if variant.data == "dev":
        learnt_and_val = {**splits, "train": whole}
        objective: Objective = DevObjective(model, learnt_and_val, variant.loss, seed=seed, batch_size=batch_size)
    else:
        learnt = _training_data(variant, whole)
        objective = CalculatorObjective(model, learnt, splits["val"], seed=seed, batch_size=batch_size)
    try:
        trained = train(objective, variant.recipe, seed=seed, observer=watch)
    except TrainingError:
        return Part(variant=variant, seed=seed, metrics=None)
    metrics = metrics_of(model, splits, trained)
    if variant.data == "dev":
        metrics = msgspec.structs.replace(metrics, measures=(*metrics.measures, *_dev_measures(model)))
    return Part(variant=variant, seed=seed, metrics=metrics)


def _dev_measures(model: Regressor) -> Iterator[Measure]:
    """Yield the mean absolute error on each dev split, on the part that is learnt and on that which is not."""
    found = dev()
    for kind, splits in (("learnt", found.learnt), ("not learnt", found.choice)):
        for name, split in splits.items():
            errors = np.abs(model.predict(split.tokens)[:, 0] - split.truth)
            yield Measure(metric="mae", split=f"{name} dev, {kind}", value=float(errors.mean()), n=len(errors))


def _training_data(variant: Variant, whole: Split) -> Split:
    if variant.data == "whole":
        return whole
    if variant.data == "floats":
        return floats()
    if variant.data == "both":
        return _joined(whole, floats())
    half = len(whole.expressions) // 2
    return _joined(_first(whole, half), _first(floats(), len(whole.expressions) - half))


def _first(split: Split, items: int) -> Split:
    return Split(split.name, split.expressions[:items], split.tokens[:items], split.truth[:items])


def _joined(one: Split, other: Split) -> Split:
    return Split(
        f"{one.name} and {other.name}",
        (*one.expressions, *other.expressions),
        np.concatenate([one.tokens, other.tokens]),
        np.concatenate([one.truth, other.truth]),
    )
