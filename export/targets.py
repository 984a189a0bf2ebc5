"""Bundles of an export, checked before the conversion: their paths, and the names of their tiers.

``x1`` is the full model, and ``x3`` is three times as fast by its recorded measurement. A model that was planned for
another device has its target and the device in its name, such as ``x2-orin-nano-super-15w``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from edge.errors import Raw, UsageError
from export.bundle.exported import FULL, int8_tier
from export.bundle.outputs import check_bundle, check_name
from export.finetune import data_inputs, place_of_data
from export.papers import looped
from export.papers.calculator.specs import NAMES as SUMMING
from export.papers.calculator.stack import NAMES as STACK_NAMES
from export.training.points import THIS
from export.training.runs import RunConfig, read_config, recorded


class Target(NamedTuple):
    """A bundle to make.

    Attributes:
        tiers: their names; empty for a calculator, which has one tier.
        data_dir: data directory of fine-tuned runs; of imported ones their texts or images, None for some of ours.
    """

    directory: Path
    name: str
    runs: tuple[Path, ...]
    tiers: tuple[str, ...]
    data_dir: Path | None


def targets_of(
    runs: Sequence[Path],
    repository: Path,
    *,
    name: str | None,
    version: int,
    tiers: Sequence[str],
    data_dir: Path | None,
    data: Path | None,
    replace: bool,
) -> list[Target]:
    """Return the bundles of runs: one for each calculator, one for the looped runs of a function class, or one for all
    fine-tuned runs.

    Args:
        name: of the bundle of fine-tuned runs; None for the others.
        data_dir: data directory; None for the one that the first run recorded.
        data: texts or images of imported runs; None for those that the first run with any recorded.

    Raises:
        UsageError: names and runs do not go together, or a bundle may not be written to its path.
    """
    configs = [_config(run) for run in runs]
    places = (place_of_data(config, data_dir, data) for config in configs)
    found = next((place for place in places if place), None)
    if name is None:
        groups: dict[str, list[tuple[Path, RunConfig]]] = {}
        for number, (run, config) in enumerate(zip(runs, configs, strict=True)):
            own = _trained_name(run, config)
            groups.setdefault(own if config.model == looped.MODEL else f"{own} {number}", []).append((run, config))
        targets = [_trained(group, repository, version, tiers, found) for group in groups.values()]
    else:
        targets = [_classifier(runs, configs, repository / f"{name}-{version}", name, tiers, found)]
    inputs: dict[str, Path | None] = {f"run {run}": run for run in runs}
    if found:
        inputs.update(place for config in configs for place in data_inputs(config, found).items())
    for number, target in enumerate(targets):
        if target.directory in [other.directory for other in targets[:number]]:
            fix = "Export one of them at a time, with another --version."
            given = Raw("a second run of this model")
            raise UsageError(f"bundle {target.directory}", given=given, expected="one run for each bundle", fix=fix)
        check_bundle(target.directory, inputs, replace=replace)
    return targets


def _config(run: Path) -> RunConfig:
    config = recorded(run)
    if config is not None or not run.is_dir():
        return config or read_config(run)
    given = Raw("a directory without a run's weights")
    expected, fix = "a run of 'fewheads train', 'finetune' or 'import'", "Train, fine-tune or import a model first."
    raise UsageError(f"run {run}", given=given, expected=expected, fix=fix)


def _own_name(config: RunConfig) -> str | None:
    """Return the name of the bundle of a run of 'fewheads train'; None for a fine-tuned run."""
    if config.model == looped.MODEL:
        return f"{looped.PREFIX}{config.arguments.get('function')}"
    return config.model if config.model in (*SUMMING, *STACK_NAMES) else None


def _trained_name(run: Path, config: RunConfig) -> str:
    name = _own_name(config)
    if name is None:
        example = Path(config.arguments.get("task", "my-model")).stem.lower()
        fix = f"Give --name, for example --name {example}; all runs become tiers of that bundle."
        given, expected = Raw("a fine-tuned run without --name"), "--name, the name of its bundle"
        raise UsageError(f"run {run}", given=given, expected=expected, fix=fix)
    return name


def _trained(
    group: Sequence[tuple[Path, RunConfig]], repository: Path, version: int, tiers: Sequence[str], data_dir: Path | None
) -> Target:
    """Return the bundle of a calculator, or of looped runs."""
    runs, configs = (tuple(column) for column in zip(*group, strict=True))
    name = _trained_name(runs[0], configs[0])
    directory = repository / f"{name}-{version}"
    if configs[0].model == looped.MODEL:
        for tier in tiers:
            check_name("--tier-name", tier)
        return Target(directory, name, runs, tuple(tier_names(runs, configs, tiers)), data_dir)
    if tiers:
        fix = "Leave --tier-name out."
        raise UsageError("--tier-name", given=tiers[0], expected=f"no name: {name} has one tier", fix=fix)
    return Target(directory, name, runs, (), data_dir)


def _classifier(
    runs: Sequence[Path],
    configs: Sequence[RunConfig],
    directory: Path,
    name: str,
    tiers: Sequence[str],
    data_dir: Path | None,
) -> Target:
    for run, config in zip(runs, configs, strict=True):
        if own := _own_name(config):
            expected = f"no name for run {run}, because its bundle is named {own}"
            raise UsageError("--name", given=name, expected=expected, fix="Leave --name out, or that run.")
    check_name("--name", name)
    for tier in tiers:
        check_name("--tier-name", tier)
    names = tier_names(runs, configs, tiers)
    return Target(directory, name, tuple(runs), tuple(names), data_dir)


#: A manifest holds eight tiers, and each run has a twin in INT8.
_MOST_RUNS = 4
#: Of a name of a reduced model; one of a manifest has 64 at most.
_MOST_CHARS = 48


def tier_names(runs: Sequence[Path], configs: Sequence[RunConfig], given: Sequence[str]) -> list[str]:
    """Return a name for each run.

    Args:
        runs: the full model first.
        given: names to use instead, one for each run in their order; empty for names by speed.

    Raises:
        UsageError: there are too many runs, the number of names differs, names are equal, or a run records no speed.
    """
    if len(runs) > _MOST_RUNS:
        fix = "Leave some of them out."
        raise UsageError("runs of one bundle", given=len(runs), expected=f"{_MOST_RUNS} at most", fix=fix)
    if given and len(given) != len(runs):
        fix = "Give --tier-name once for each run, in the same order."
        raise UsageError("--tier-name", given=list(given), expected=f"{len(runs)} names", fix=fix)
    names = list(given) or [FULL]
    for run, config in zip(runs[len(names) :], configs[len(names) :], strict=True):
        name = reduced_name(configs[0], config)
        if name is None:
            given_speed, expected = Raw("no measured speed"), "a run that comes from 'fewheads reduce'"
            fix = "Name the tiers: give --tier-name once for each run."
            raise UsageError(f"run {run}", given=given_speed, expected=expected, fix=fix)
        names.append(name)
    taken = [*names, *map(int8_tier, names)]
    if len(set(taken)) < len(taken):
        fix = "Name the tiers: give another --tier-name for each run."
        raise UsageError("tiers", given=names, expected="names that differ, with -int8 behind them too", fix=fix)
    return names


def reduced_name(full: RunConfig, lean: RunConfig) -> str | None:
    """Return the name of a reduced run's tier; None for a run that was not reduced.

    It is ``xN`` for a run that was measured as N times as fast as the full one, and ``xN-DEVICE`` for one that was
    planned to be so on another device.
    """
    if lean.planned and lean.planned.device != THIS:
        device = re.sub(r"[^a-z0-9._]+", "-", lean.planned.device.lower()).strip("-._")
        return f"x{lean.planned.target_speedup:g}-{device}"[:_MOST_CHARS].rstrip("-._")
    if lean.speedup is None:
        return None
    return f"x{lean.speedup.ratio / (full.speedup.ratio if full.speedup else 1):.2g}"
