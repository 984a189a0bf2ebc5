"""Bundles of an export, checked before the conversion: their paths, and the names of their tiers.

``x1`` is the full model, and ``x3`` is three times as fast by its recorded measurement. A model that was planned for
another device has its target and the device in its name, such as ``x2-orin-nano-super-15w``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edge.errors import Raw, UsageError
from export.bundle.exported import FULL, RUNTIMES, int8_tier
from export.bundle.outputs import check_bundle, check_name
from export.finetune import data_inputs, place_of_data
from export.training.points import THIS
from export.training.runs import RunConfig, read_config, recorded

if TYPE_CHECKING:
    from export.bundle.exportable import Exportable


class Kind(NamedTuple):
    """A kind of run that becomes a bundle.

    Attributes:
        exportable: loads torch, and returns the model that becomes the bundle of a target.
        name_of: the name of a run's bundle; None where the user gives the name.
        has_tiers: whether several runs become the tiers of one bundle, with a file for each runtime; else a run becomes
            one file for all of them.
    """

    exportable: Callable[[NewBundle], Exportable]
    name_of: Callable[[RunConfig], str] | None = None
    has_tiers: bool = True


class NewBundle(NamedTuple):
    """A bundle to make.

    Attributes:
        tiers: their names; empty for a kind with one tier.
        data: data directory of fine-tuned runs; of imported ones their texts or images, None for some of ours.
        artifacts: of :data:`export.bundle.exported.RUNTIMES`.
        cascade: see :class:`export.bundle.classifier.Classifiers`.
    """

    kind: Kind
    name: str
    runs: tuple[Path, ...]
    tiers: tuple[str, ...]
    data: Path | None
    artifacts: tuple[str, ...]
    cascade: float | None = None


def new_bundles(
    runs: Sequence[Path],
    kind_of: Callable[[RunConfig], Kind],
    repository: Path,
    *,
    version: int,
    replace: bool,
    name: str | None,
    tiers: Sequence[str],
    artifacts: tuple[str, ...],
    data_dir: Path | None,
    data: Path | None,
) -> list[NewBundle]:
    """Return the bundles of runs: those of one kind and name are tiers of one bundle, where the kind has tiers.

    Args:
        name: of the bundle of the runs that have no name by their kind.
        artifacts: runtimes whose files a bundle carries; empty for all.
        data_dir: data directory; None for the one that the first run recorded.
        data: texts or images of imported runs; None for those that the first run with any recorded.

    Raises:
        UsageError: options and runs do not go together, or a bundle may not be written to its path.
    """
    configs = [_config(run) for run in runs]
    given = (place_of_data(config, data_dir, data) for config in configs)
    directory = next((path for path in given if path), None)
    inputs: dict[str, Path | None] = {f"run {run}": run for run in runs}
    if directory:
        inputs.update(path for config in configs for path in data_inputs(config, directory).items())
    groups: dict[Path, tuple[Kind, str, list[tuple[Path, RunConfig]]]] = {}
    for run, config in zip(runs, configs, strict=True):
        kind = kind_of(config)
        bundle = _checked_name(run, config, kind, name)
        path = repository / f"{bundle}-{version}"
        if path in groups and not kind.has_tiers:
            fix = "Export one of them at a time, with another --version."
            again = Raw("a second run of this model")
            raise UsageError(f"bundle {path}", given=again, expected="one run for each bundle", fix=fix)
        groups.setdefault(path, (kind, bundle, []))[2].append((run, config))
    targets = []
    for path, (kind, bundle, members) in groups.items():
        chosen, described = zip(*members, strict=True)
        if not kind.has_tiers:
            _check_single(bundle, tiers, artifacts)
        names = tuple(tier_names(chosen, described, tiers)) if kind.has_tiers else ()
        check_bundle(path, inputs, replace=replace)
        targets.append(NewBundle(kind, bundle, chosen, names, directory, artifacts or RUNTIMES))
    return targets


def _config(run: Path) -> RunConfig:
    config = recorded(run)
    if config is not None or not run.is_dir():
        return config or read_config(run)
    given = Raw("a directory without a run's weights")
    expected, fix = "a run of 'fewheads train', 'finetune' or 'import'", "Train, fine-tune or import a model first."
    raise UsageError(f"run {run}", given=given, expected=expected, fix=fix)


def _checked_name(run: Path, config: RunConfig, kind: Kind, name: str | None) -> str:
    """Return the name of a run's bundle: that of its kind, or the given one."""
    if kind.name_of is None:
        if name is not None:
            return check_name("--name", name)
        example = Path(config.arguments.get("task", "my-model")).stem.lower()
        fix = f"Give --name, for example --name {example}; all runs become tiers of that bundle."
        given, expected = Raw("a fine-tuned run without --name"), "--name, the name of its bundle"
        raise UsageError(f"run {run}", given=given, expected=expected, fix=fix)
    bundle = kind.name_of(config)
    if name is not None:
        expected = f"no name for run {run}, because its bundle is named {bundle}"
        raise UsageError("--name", given=name, expected=expected, fix="Leave --name out, or that run.")
    return bundle


def _check_single(bundle: str, tiers: Sequence[str], artifacts: Sequence[str]) -> None:
    """Refuse options of bundles with several tiers or files."""
    for option, given, has in (
        ("--tier-name", tiers, "one tier"),
        ("--artifacts", artifacts, "one file for all runtimes"),
    ):
        if given:
            expected = f"nothing: {bundle} has {has}"
            raise UsageError(option, given=given[0], expected=expected, fix=f"Leave {option} out.")


def no_cascade(share: float) -> UsageError:
    """Return the error of a cascade of models that cannot be one."""
    fix = "Give fine-tuned runs of one task with classes, the full model first, or leave --cascade out."
    return UsageError("--cascade", given=share, expected="two classifiers or more with it, measured in FP32", fix=fix)


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
        UsageError: there are too many runs, a name is not allowed or missing, names are equal, or a run has no speed.
    """
    for tier in given:
        check_name("--tier-name", tier)
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
    """Return ``xN`` for a reduced run measured as N times as fast, ``xN-DEVICE`` for one planned so, else None."""
    if lean.planned and lean.planned.device != THIS:
        device = re.sub(r"[^a-z0-9._]+", "-", lean.planned.device.lower()).strip("-._")
        return f"x{lean.planned.target_speedup:g}-{device}"[:_MOST_CHARS].rstrip("-._")
    if lean.speedup is None:
        return None
    return f"x{lean.speedup.ratio / (full.speedup.ratio if full.speedup else 1):.2g}"
