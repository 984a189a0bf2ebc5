"""The command that restores the accuracy of a reduced run, to be copied."""

from __future__ import annotations

import shlex
from pathlib import Path

from export.finetune import is_imported
from export.finetune.recipe import MAX_LENGTH, RESTORING
from export.training.runs import OwnData, RunConfig


def restoring_command(config: RunConfig, data_dir: Path, *, model: Path, teacher: Path) -> str:
    """Return the ``fewheads finetune`` that distils a reduced run from its original, by the recipe that restored most.

    Args:
        config: of the original.
        data_dir: what :func:`export.finetune.needed_data` found.
        model: the reduced run, beside which the new one is to be.
    """
    if config.own_data:
        data = _own_data(config.own_data.located(data_dir))
    elif is_imported(config):
        data = ["--data", str(data_dir)]
    else:
        data = [config.arguments["task"], "--data-dir", str(data_dir)]
    length = config.arguments.get("max_length", MAX_LENGTH)
    if length != MAX_LENGTH and not is_imported(config):
        data += ["--max-length", str(length)]
    recipe = ["--epochs", str(RESTORING.epochs), "--lr", str(RESTORING.peak_learning_rate)]
    recipe += ["--hidden", f"{RESTORING.distillation.hidden:g}"]
    place = ["--name", f"{model.name}-taught", "--out", str(model.parent)]
    return shlex.join(
        ["fewheads", "finetune", *data, "--model", str(model), "--teacher", str(teacher), *recipe, *place]
    )


def _own_data(data: OwnData) -> list[str]:
    """Return the options that read own data as they were read."""
    options = ["--data", data.path, *(["--dev", data.dev] if data.dev else [])]
    if data.images:
        return options
    for name in data.texts:
        options += ["--text", name]
    options += ["--label", data.label]
    if not data.labels:
        return [*options, "--regression"]
    if any("," in name for name in data.labels):  # so they were not given, but are those of the data
        return [*options, "--classification"]
    return [*options, "--labels", ",".join(data.labels)]
