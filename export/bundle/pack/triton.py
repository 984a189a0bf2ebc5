"""Bundles of the ONNX models of a model repository of Triton: ``fewheads pack DIR --triton``."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from msgspec.structs import replace as replaced

from edge.bundles.manifest import Serving
from edge.errors import FewheadsError, Raw, UsageError
from edge.pb import inference_pb2 as pb
from export.bundle.outputs import TRITON_CONFIG, check_name
from export.bundle.pack.bundle import Packed, pack_model
from export.bundle.pack.config import Config, read_config
from export.bundle.pack.fit import fit
from export.bundle.pack.options import PackOptions

_MOST_ROWS: Final = 4096
_MOST_DELAY_US: Final = 1_000_000
_MOST_LABEL_BYTES: Final = 16 * 2**20
_BACKEND, _PLATFORM, _FILE = "onnxruntime", "onnxruntime_onnx", "model.onnx"
#: Triton ignores other directories, and those with zeros in front.
_VERSION: Final = re.compile(r"[1-9][0-9]{0,8}")
#: Fields with which a model computes something else than its ONNX file does of one request.
_REFUSED: Final = {
    "ensemble_scheduling": "an ensemble of models",
    "sequence_batching": "requests that depend on earlier ones",
    "batch_input": "inputs that Triton makes of a batch",
    "batch_output": "outputs that Triton cuts out of a batch",
    "input.allow_ragged_batch": "rows of several lengths in one input",
}
#: Fields of our message that a bundle has no place for.
_NO_PLACE: Final = ("instance_group", "parameters")
_NO_PLACE_IN_BATCHING: Final = ("priority_levels", "default_priority_level", "default_queue_policy")


class Refused(NamedTuple):
    """A model that did not become a bundle, and why."""

    model: str
    error: FewheadsError


class _Model(NamedTuple):
    """A model of a repository; ``versions`` are the ONNX files of those that Triton would serve."""

    config: Config
    versions: dict[int, Path]
    labels: Path | None
    not_taken: tuple[str, ...]


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
        The bundles, and without ``name`` the models that a bundle cannot hold.

    Raises:
        UsageError: there are no such models, or ``name`` cannot be packed.
    """
    packed, refused = list[Packed](), list[Refused]()
    for place in _models_in(directory, name):
        one = _pack(place, repository, options, replace=replace, begin=begin)
        if isinstance(one, Refused):
            if name:
                raise one.error
            refused.append(one)
        else:
            packed += one
    return packed, refused


def _pack(
    place: Path, repository: Path, options: PackOptions, *, replace: bool, begin: Callable[[str], None]
) -> list[Packed] | Refused:
    try:
        model = _read(place)
        options = replaced(options, max_batch_size=_max_batch_size(place, model), labels=options.labels or model.labels)
        return [
            replaced(
                pack_model(
                    path,
                    repository,
                    place.name,
                    options,
                    version=version,
                    replace=replace,
                    changes=[partial(fit, config=model.config.message, source=place / TRITON_CONFIG)],
                    serving=_serving(model.config.message),
                    begin=lambda step: begin(f"{place.name}: {step}"),
                ),
                not_taken=model.not_taken,
            )
            for version, path in model.versions.items()
        ]
    except FewheadsError as error:
        return Refused(place.name, error)


def _models_in(directory: Path, name: str | None) -> list[Path]:
    if not directory.is_dir() or (directory / TRITON_CONFIG).exists():
        given = Raw("the directory of one model" if directory.is_dir() else "no directory")
        fix = "Give the directory above it, and --name." if directory.is_dir() else "Correct the path."
        expected = f"a model repository of Triton, NAME/{TRITON_CONFIG} and NAME/1/{_FILE}"
        raise UsageError(f"--triton {directory}", given=given, expected=expected, fix=fix)
    found = {path.name: path for path in sorted(directory.iterdir()) if path.is_dir() and not path.name.startswith(".")}
    for path in found.values():
        _inside(path, directory)
    if name is not None and name not in found:
        expected = f"a model of {directory}: {', '.join(found) or 'none at all'}"
        raise UsageError("--name", given=name, expected=expected, fix="Leave it out for all of them.")
    if not found:
        expected = f"models, as NAME/{TRITON_CONFIG} and NAME/1/{_FILE}"
        raise UsageError(f"--triton {directory}", given=Raw("none"), expected=expected, fix="Correct the path.")
    return [found[name]] if name is not None else list(found.values())


def _inside(path: Path, directory: Path) -> Path:
    """Return a path; raise a UsageError if it, or what it links to, is outside of a directory."""
    if not path.resolve().is_relative_to(directory.resolve()):
        given, fix = Raw(f"{path.resolve()}"), "Copy it there."
        raise UsageError(f"{path}", given=given, expected=f"a path inside of {directory}", fix=fix)
    return path


def _regular(path: Path, directory: Path) -> Path:
    """Return the path of a file inside of a directory; reading a pipe would wait forever."""
    try:
        is_file = stat.S_ISREG(_inside(path, directory).stat().st_mode)
        given = Raw("something else")
    except OSError as error:
        is_file, given = False, Raw(error.strerror)
    if not is_file:
        raise UsageError(f"{path}", given=given, expected="a regular file", fix=f"Put it into {path.parent}.")
    return path


def _read(place: Path) -> _Model:
    exists = (place / TRITON_CONFIG).exists() or (place / TRITON_CONFIG).is_symlink()
    config = read_config(_regular(place / TRITON_CONFIG, place)) if exists else Config(pb.ModelConfig(), ())
    message, subject = config.message, f"{place / TRITON_CONFIG}"
    backend = message.backend or {"": _BACKEND, _PLATFORM: _BACKEND}.get(message.platform, message.platform)
    check_name(f"name of {place}", place.name)
    for field, reason in _REFUSED.items():
        if field in config.unknown:
            fix = "Leave this model to Triton, or give the ONNX files of its parts to 'fewheads pack'."
            raise UsageError(f"{subject} {field}", given=Raw(reason), expected="one ONNX model", fix=fix)
    if backend != _BACKEND:
        fix = f"Export the model to ONNX, with platform: {_PLATFORM!r}, or leave it to Triton."
        raise UsageError(f"{subject} backend", given=backend, expected=_BACKEND, fix=fix)
    if message.name not in ("", place.name):
        raise UsageError(f"{subject} name", given=message.name, expected=place.name, fix="Give both the same name.")
    labelled = [output.label_filename for output in message.output if output.label_filename]
    notes, labels = _notes(config), None
    if len(labelled) == 1 and message.max_batch_size:
        labels = _regular(place / labelled[0], place)
        if labels.stat().st_size > _MOST_LABEL_BYTES:
            given, expected = Raw(f"{labels.stat().st_size} bytes"), f"at most {_MOST_LABEL_BYTES}"
            raise UsageError(f"{labels}", given=given, expected=expected, fix="Give a label in each line.")
    elif labelled:
        notes.append("label_filename, which needs one output [batch, labels]")
    return _Model(config, _versions(place, message), labels, tuple(notes))


def _notes(config: Config) -> list[str]:
    message, batching = config.message, config.message.dynamic_batching
    notes = [name for name in _NO_PLACE if getattr(message, name)]
    set_fields = {field.name for field, _ in batching.ListFields()}
    notes += [f"dynamic_batching.{name}" for name in _NO_PLACE_IN_BATCHING if name in set_fields]
    if batching.max_queue_delay_microseconds > _MOST_DELAY_US:
        notes.append(f"dynamic_batching.max_queue_delay_microseconds above {_MOST_DELAY_US}")
    return [*config.unknown, *notes]


def _max_batch_size(place: Path, model: _Model) -> int | None:
    """Return the batch size of a configuration; None where that says nothing, and Triton asks the ONNX file, too."""
    message = model.config.message
    rows = message.max_batch_size
    if not 0 <= rows <= _MOST_ROWS:
        expected, fix = f"0 to {_MOST_ROWS}", "Give a batch size that a board has memory for."
        raise UsageError(f"{place / TRITON_CONFIG} max_batch_size", given=rows, expected=expected, fix=fix)
    return rows if rows or message.input or message.output else None


def _serving(message: pb.ModelConfig) -> Serving | None:
    if not message.HasField("dynamic_batching"):
        return None
    batching = message.dynamic_batching
    delay_us = min(batching.max_queue_delay_microseconds, _MOST_DELAY_US)
    return Serving(max_queue_delay_us=delay_us, preferred_batch_sizes=tuple(batching.preferred_batch_size))


def _versions(place: Path, message: pb.ModelConfig) -> dict[int, Path]:
    """Return the ONNX files of the versions of the policy: the latest one, unless it says otherwise."""
    numbers = sorted(int(path.name) for path in place.iterdir() if path.is_dir() and _VERSION.fullmatch(path.name))
    policy, chosen = message.version_policy, numbers[-1:]
    if policy.HasField("specific"):
        chosen = list(policy.specific.versions)
    elif policy.HasField("all"):
        chosen = numbers
    elif policy.HasField("latest"):
        chosen = numbers[-max(policy.latest.num_versions, 1) :]
    missing = [number for number in chosen if number not in numbers]
    if missing or not chosen:
        given = Raw(f"none with the name {missing[0]}" if missing else "none")
        expected, fix = "a directory for each version, such as 1", f"Put {_FILE} into {place / '1'}."
        raise UsageError(f"versions of {place}", given=given, expected=expected, fix=fix)
    files = {}
    for number in chosen:
        path = place / str(number) / (message.default_model_filename or _FILE)
        files[number] = _regular(path / _FILE if path.is_dir() else path, place)
    return files
