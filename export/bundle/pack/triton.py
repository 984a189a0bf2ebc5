"""Bundles of the ONNX models of a model repository of Triton: ``fewheads pack DIR --triton``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace as replaced

from edge.errors import FewheadsError
from export.bundle.outputs import TRITON_CONFIG
from export.bundle.pack.bundle import Packed, pack_model
from export.bundle.pack.fit import fit
from export.bundle.pack.options import PackOptions
from export.bundle.pack.triton_model import models_in, read_model


class Refused(NamedTuple):
    """A model, or a version ``NAME-VERSION`` of one, that did not become a bundle, and why."""

    model: str
    error: FewheadsError


def pack_repository(
    directory: Path,
    repository: Path,
    name: str | None,
    options: PackOptions,
    *,
    replace: bool = False,
    begin: Callable[[str], None] = lambda step: None,
) -> tuple[list[Packed], list[Refused]]:
    """Write a bundle for each version of each model that Triton would serve, or of the model ``name`` alone.

    Args:
        directory: ``NAME/config.pbtxt`` and ``NAME/VERSION/model.onnx``.
        options: for each model; its configuration sets the batch size and the labels.
        begin: called with the name of each model and step before it begins.

    Returns:
        The bundles, and the models and versions that a bundle cannot hold.

    Raises:
        UsageError: there are no such models, or nothing of ``name`` can be packed.
    """
    found = [
        one
        for place in models_in(directory, name)
        for one in _pack(place, repository, options, replace=replace, begin=begin)
    ]
    packed = [one for one in found if isinstance(one, Packed)]
    refused = [one for one in found if isinstance(one, Refused)]
    if name and not packed:
        raise refused[0].error
    return packed, refused


def _pack(
    place: Path, repository: Path, options: PackOptions, *, replace: bool, begin: Callable[[str], None]
) -> Iterator[Packed | Refused]:
    try:
        model = read_model(place)
    except FewheadsError as error:
        yield Refused(place.name, error)
        return
    labels = {"labels": model.labels, "labelled": model.labelled} if options.labels is None else {}
    pack = partial(
        pack_model,
        repository=repository,
        name=place.name,
        options=replaced(options, max_batch_size=model.max_batch_size, **labels),
        replace=replace,
        changes=[partial(fit, config=model.config, source=place / TRITON_CONFIG)],
        serving=model.serving,
        begin=lambda step: begin(f"{place.name}: {step}"),
    )
    for version, path in model.versions.items():
        yield _packed(f"{place.name}-{version}", partial(pack, path, version=version), model.not_taken)


def _packed(name: str, pack: Callable[[], Packed], not_taken: tuple[str, ...]) -> Packed | Refused:
    try:
        return replaced(pack(), not_taken=not_taken)
    except FewheadsError as error:
        return Refused(name, error)
