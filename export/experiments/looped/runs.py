"""Trained runs, grouped by what they learn, their shape and training; the runs of a group differ in their seed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge.errors import Raw, UsageError
from edge.files import sha256
from export.papers.looped import MODEL
from export.papers.looped.functions import FUNCTION_CLASSES
from export.papers.looped.model import PromptConfig, PromptTransformer
from export.papers.looped.train import create
from export.training.checkpoint import load
from export.training.runs import WEIGHTS

#: Loops of a model whose training is not recorded.
_LOOPS = 30


class Trained(NamedTuple):
    """A run.

    Attributes:
        loops: the most that the last stage of its training ran; 1 if unlooped.
        training: the record of how it was trained, without the seed.
        steps: of its training, all stages together; None if they are not recorded.
        digest: of the weights and the model's arguments.
    """

    name: str
    function: str
    model: PromptTransformer
    seed: int
    loops: int
    seconds: float
    training: str
    steps: int | None
    digest: str

    @property
    def looped(self) -> bool:
        """Whether the model is looped."""
        return self.model.config.injection is not None


class Task(NamedTuple):
    """What models learn: a function class, d, and the points of the longest prompt."""

    function: str
    dims: int
    points: int

    @property
    def name(self) -> str:
        """Name of its files."""
        return f"{self.function}-d{self.dims}"

    @property
    def normaliser(self) -> float:
        """Variance of the values."""
        return FUNCTION_CLASSES[self.function].normaliser(self.dims)


#: The runs of a task by the name of their group.
Groups = Mapping[str, Sequence[Trained]]


def open_runs(paths: Iterable[Path]) -> dict[Task, dict[str, list[Trained]]]:
    """Return the runs of each task by group, in the order given.

    Raises:
        CheckpointError: a path is not a run of a transformer for prompts.
        UsageError: two runs have the same name or are the same model, or a run's function class is unknown.
    """
    tasks: dict[Task, dict[str, list[Trained]]] = {}
    trainings: dict[tuple[Task, str], list[str]] = {}
    known: dict[str, Path] = {}
    for path in paths:
        run = _open(path)
        for key in (run.name, run.digest):
            if key in known:
                expected = f"runs with names and weights of their own, unlike {known[key]}"
                raise UsageError("RUN", given=str(path), expected=expected, fix="Leave one of them out, or rename it.")
            known[key] = path
        config = run.model.config
        task = Task(run.function, config.dims, config.points)
        name = group_name(config)
        trained = trainings.setdefault((task, name), [])
        if run.training not in trained:
            trained.append(run.training)
        number = trained.index(run.training) + 1
        name = name if number == 1 else f"{name}, training {number}"
        tasks.setdefault(task, {}).setdefault(name, []).append(run)
    return tasks


def group_name(config: PromptConfig) -> str:
    """Return the name of the group of a model: its shape, and its injection unless that is a sum."""
    first = config.shapes[0]
    words = ["unlooped" if config.injection is None else "looped", f"L={len(config.shapes)}", f"D={config.dim}"]
    if first.num_heads * first.head_dim != config.dim or first.ffn_dim != 4 * config.dim:
        words.append(f"{first.num_heads} heads of {first.head_dim}, {first.ffn_dim} units")
    if config.injection not in ("add", None):
        words.append({"none": "no injection"}.get(config.injection, config.injection))
    return ", ".join(words)


def main_group(groups: Groups, *, looped: bool) -> str | None:
    """Return the group that stands for the looped or unlooped models: most seeds, else the first; None without any."""
    names = [name for name, runs in groups.items() if runs[0].looped is looped]
    return max(names, key=lambda name: len(groups[name])) if names else None


def _open(path: Path) -> Trained:
    model, config, metrics = load(path, {MODEL: create})
    function = config.arguments.get("function")
    if function not in FUNCTION_CLASSES:
        expected, fix = f"one of {', '.join(FUNCTION_CLASSES)}", "Train it again."
        raise UsageError(f"{path} function", given=Raw(function), expected=expected, fix=fix)
    loops, trainer = 1, config.provenance.trainer
    if model.config.injection is not None:
        # The stages' curricula are a part of the record; the last number is that of the last stage.
        recorded = re.findall(r"loops=Rising\(start=\d+, end=(\d+)", trainer)
        loops = int(recorded[-1]) if recorded else _LOOPS
    steps = sum(map(int, re.findall(r"(?:^|; )\w+: (\d+) steps", trainer))) or None
    digest = sha256((path / WEIGHTS).read_bytes() + msgspec.json.encode(config.arguments))
    return Trained(
        *(path.resolve().name, function, model, config.provenance.seed or 0, loops, metrics.seconds, trainer),
        steps,
        digest,
    )
