"""A fine-tuned Hugging Face directory to a run directory."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from export.finetune.imported import ImportedTask
from export.finetune.models import MODEL
from export.importing.directory import read_directory
from export.importing.run import Parity, check_parity, missing_library
from export.training.checkpoint import save
from export.training.provenance import processor, provenance
from export.training.runs import TOKENIZER, RunConfig, RunMetrics


class ImportedRun(msgspec.Struct, frozen=True):
    """A run that was made of a Hugging Face directory.

    Attributes:
        task: of :data:`export.finetune.IMPORTED`.
        labels: none of a span or an embedding.
        width: columns of an output.
        parity: None if the package to compare with, ``missing``, is not installed.
    """

    run: str
    task: str
    labels: tuple[str, ...]
    width: int
    max_length: int
    parameters: int
    parity: Parity | None
    missing: str | None


def import_run(
    directory: Path, run: Path, *, data: Path | None = None, pair: bool = False, max_length: int | None = None
) -> ImportedRun:
    """Read a directory, compare it with the package that saved it, and write a run; an earlier run is replaced.

    Args:
        data: texts or images, whose path is recorded for later commands.
        pair, max_length: see :func:`export.importing.directory.read_directory`.

    Raises:
        CheckpointError: the directory is malformed or not supported.
        GoldenError: its outputs are not those of the package.
        DataError: ``data`` cannot be read.
    """
    started = time.perf_counter()
    found = read_directory(directory, pair=pair, max_length=max_length)
    if data is not None:
        ImportedTask(found.architecture, found.model).items(data)
    missing = missing_library(found)
    parity = None if missing else check_parity(directory, found)
    parameters = sum(parameter.numel() for parameter in found.model.parameters())
    record = provenance(trainer=f"imported from {directory.name}", data="that of the imported model", seed=None)
    architecture = msgspec.to_builtins(found.architecture)
    place = None if data is None else str(data.resolve())
    save(
        run,
        found.model,
        RunConfig(MODEL, architecture, record, place, processor=processor()),
        RunMetrics(parameters, 0, 0, time.perf_counter() - started, ()),
        {} if found.tokenizer is None else {TOKENIZER: found.tokenizer.to_str().encode()},
    )
    return ImportedRun(
        str(run),
        found.architecture.task,
        found.architecture.labels,
        found.model.width,
        found.architecture.max_length,
        parameters,
        parity,
        missing,
    )
