"""The tables of RESULTS.md of restored encoders; ``python -m export.reduce.restoration_tables`` writes them anew.

``results/restoration.jsonl`` has a line for each restoration: device, plan, recipe, steps and what was measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from export.report.table import Table, with_tables, write_pages
from export.training.intervals import over_seeds, with_interval

PAGE = Path(__file__).with_name("RESULTS.md")
_RECORDS = PAGE.parent / "results" / "restoration.jsonl"
#: Speed-ups that the plans of the race were made for, the largest first.
_TARGETS = (4, 3, 2, 1.5)


class LayerSize(msgspec.Struct, frozen=True, array_like=True):
    """Heads, their width and hidden units of a layer."""

    heads: int
    width: int
    units: int

    def __str__(self) -> str:
        return f"{self.heads} x {self.width}, {self.units}" if self.heads else f"none, {self.units}"


class HeldOutMeasure(msgspec.Struct, frozen=True, array_like=True):
    """Distance from the original on text that was held out, after a step: mean cosine, perhaps hidden states' error."""

    step: int
    cosine: float
    hidden: float | None


class RestorationRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A restored encoder.

    Attributes:
        stage: ``recipes``, ``race`` or ``seeds``.
        student: its name in the stage.
        choice: how the layers were chosen.
        plan: the shape of each original layer; None is left out.
        predicted_speedups: on ``board``, by the number of tokens, at batch 1.
        recipe: the learning rate, the weights of the losses, and the rest of the training's settings.
        before: mean cosine to the original before training.
        stsb_train, original_stsb_train: Spearman's correlation times 100 on the training set of STS-B.
        layer_parameters: of all layers that stay.
        held_out: at evaluations.
        losses: after steps.
        seconds: of the stage, whose students share the original's passes.
    """

    model: str
    stage: str
    student: str
    choice: str
    plan: tuple[LayerSize | None, ...]
    board: str
    predicted_speedups: dict[str, float]
    recipe: dict[str, float]
    before: float
    stsb_train: float
    original_stsb_train: float
    layer_parameters: int
    held_out: tuple[HeldOutMeasure, ...]
    losses: tuple[tuple[int, float], ...]
    steps: int
    seconds: float
    device: str
    torch: str

    @property
    def cosine(self) -> float:
        """The mean cosine to the original at the end."""
        return self.held_out[-1].cosine

    @property
    def target(self) -> float:
        """The largest target that the plan reaches at 32 tokens."""
        return next(target for target in _TARGETS if self.predicted_speedups["32"] >= target)

    @property
    def layers(self) -> str:
        """The layers that stay, counted from 0, and their shapes."""
        kept = {number: shape for number, shape in enumerate(self.plan) if shape}
        if len(set(kept.values())) == 1:
            return f"{', '.join(map(str, kept))}: {next(iter(kept.values()))}"
        return "; ".join(f"{number}: {shape}" for number, shape in kept.items())


def pages() -> dict[Path, str]:
    """Return RESULTS.md with its tables made from the records."""
    lines = _RECORDS.read_bytes().splitlines()
    records = [msgspec.json.decode(line, type=RestorationRecord) for line in lines]
    tables = {"race": _race(records), "seeds": _seeds(records), "recipes": _recipes(records)}
    by_record = {f"export/reduce/results/{_RECORDS.name}#{name}": table for name, table in tables.items()}
    return {PAGE: with_tables(PAGE.read_text(), "python -m export.reduce.restoration_tables", by_record)}


def _race(records: Sequence[RestorationRecord]) -> Table:
    raced = sorted((one for one in records if one.stage == "race"), key=lambda one: (one.target, -one.cosine))
    rows, seen = [], set[float]()
    for one in raced:
        target = "" if one.target in seen else f"{one.target:g}×"
        seen.add(one.target)
        faster = (f"{one.predicted_speedups[tokens]:.2f}" for tokens in ("32", "128"))
        rows.append((target, one.choice, one.layers, *faster, f"{one.before:.3f}", *_reached(one)))
    heads = ("for", "choice", "layers: heads x width, units", "times faster, 32 tokens", "128", "cosine before")
    return Table("", (*heads, "restored", "STS-B train"), rows, 3)


def _seeds(records: Sequence[RestorationRecord]) -> Table:
    groups = defaultdict[tuple[float, str], list[RestorationRecord]](list)
    for one in records:
        if one.stage == "seeds":
            groups[one.target, one.choice].append(one)
    rows = []
    for (target, choice), runs in sorted(groups.items(), key=lambda group: (group[0][0], -group[1][0].cosine)):
        faster = (f"{runs[0].predicted_speedups[tokens]:.2f}" for tokens in ("32", "128"))
        cosine = _mean([run.cosine for run in runs], "{:.4f}")
        similarity = _mean([run.stsb_train for run in runs], "{:.1f}")
        pairs = zip(runs, groups[target, "search"], strict=True)
        ahead = "" if choice == "search" else _mean([run.cosine - other.cosine for run, other in pairs], "{:+.4f}")
        rows.append((f"{target:g}×", choice, runs[0].layers, *faster, len(runs), cosine, similarity, ahead))
    heads = ("for", "choice", "layers: heads x width, units", "times faster, 32 tokens", "128", "seeds")
    return Table("", (*heads, "cosine", "STS-B train", "cosine ahead of the search"), rows, 3)


def _mean(values: Sequence[float], form: str) -> str:
    mean = over_seeds(values)
    return with_interval(mean.value, mean.interval, form.format)


def _recipes(records: Sequence[RestorationRecord]) -> Table:
    tried = [one for one in records if one.stage == "recipes"]
    rows: list[Sequence[Any]] = []
    first: dict[str, RestorationRecord] = {}
    for one in tried:
        base = first.setdefault(one.model, one)
        changed = [f"{name} {value:g}" for name, value in one.recipe.items() if value != base.recipe[name]]
        name = f"{one.model}, {one.steps} steps" if one is base else ""
        rate = f"{one.recipe['peak_learning_rate']:.0e}".replace("e-0", "e-")
        what = ", ".join(text for text in changed if not text.startswith("peak")) or ("first" if one is base else "")
        rows.append((name, rate, what, *_reached(one), f"{one.held_out[-1].hidden:.3f}"))
    return Table("", ("model", "peak rate", "changed", "cosine", "STS-B train", "hidden states' error"), rows, 3)


def _reached(one: RestorationRecord) -> tuple[str, str]:
    return f"{one.cosine:.4f}", f"{one.stsb_train:.1f}"


if __name__ == "__main__":
    write_pages(pages())
