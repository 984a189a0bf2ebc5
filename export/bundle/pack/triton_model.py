"""Models of a model repository of Triton: which there are, their files, and what a bundle has no place for."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Final, NamedTuple

from edge.bundles.manifest import Serving
from edge.errors import Raw, UsageError
from edge.pb import inference_pb2 as pb
from export.bundle.outputs import TRITON_CONFIG, check_name
from export.bundle.pack.config import Config, read_config

#: Limits of a manifest.
_MOST_ROWS: Final = 4096
_MOST_SIZES: Final = 16
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


class Model(NamedTuple):
    """A model of a repository.

    Attributes:
        versions: the ONNX files of those that Triton would serve.
        max_batch_size: None where the configuration says nothing, and Triton asks the ONNX file, too.
        labelled: the output that ``labels``, a file, are of.
        not_taken: what a bundle has no place for.
    """

    config: pb.ModelConfig
    versions: dict[int, Path]
    max_batch_size: int | None
    labels: Path | None
    labelled: str | None
    serving: Serving | None
    not_taken: tuple[str, ...]


def models_in(directory: Path, name: str | None) -> list[Path]:
    """Return the directories of the models of a repository, or of one; a UsageError refuses other directories."""
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
    try:
        real = path.resolve()
    except (RuntimeError, ValueError) as error:  # links in a circle, and a name with a zero
        given, fix = Raw(error), "Correct the name or the link."
    else:
        if real.is_relative_to(directory.resolve()):
            return path
        given, fix = Raw(real), "Copy it there."
    raise UsageError(f"{path}", given=given, expected=f"a path inside of {directory}", fix=fix)


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


def read_model(place: Path) -> Model:
    """Read a model's directory; a UsageError refuses a model that a bundle cannot hold, and files outside of it."""
    exists = (place / TRITON_CONFIG).exists() or (place / TRITON_CONFIG).is_symlink()
    config = read_config(_regular(place / TRITON_CONFIG, place)) if exists else Config(pb.ModelConfig(), ())
    message, subject = config.message, f"{place / TRITON_CONFIG}"
    backend = message.backend or {"": _BACKEND, _PLATFORM: _BACKEND}.get(message.platform, message.platform)
    _check_name(place)
    for field, reason in _REFUSED.items():
        if field in config.unknown:
            fix = "Leave this model to Triton, or give the ONNX files of its parts to 'fewheads pack'."
            raise UsageError(f"{subject} {field}", given=Raw(reason), expected="one ONNX model", fix=fix)
    if backend != _BACKEND:
        fix = f"Export the model to ONNX, with platform: {_PLATFORM!r}, or leave it to Triton."
        raise UsageError(f"{subject} backend", given=backend, expected=_BACKEND, fix=fix)
    if message.name not in ("", place.name):
        raise UsageError(f"{subject} name", given=message.name, expected=place.name, fix="Give both the same name.")
    _check_rows(subject, message.max_batch_size)
    labelled = [output for output in message.output if output.label_filename]
    notes, labels, name = _notes(config), None, None
    if len(labelled) == 1 and message.max_batch_size:
        labels, name = _regular(place / labelled[0].label_filename, place), labelled[0].name
        if labels.stat().st_size > _MOST_LABEL_BYTES:
            given, expected = Raw(f"{labels.stat().st_size} bytes"), f"at most {_MOST_LABEL_BYTES}"
            raise UsageError(f"{labels}", given=given, expected=expected, fix="Give a label in each line.")
    elif labelled:
        notes.append("label_filename, which needs one output [batch, labels]")
    rows = message.max_batch_size if message.max_batch_size or message.input or message.output else None
    serving = _serving(subject, message)
    return Model(message, _versions(place, message), rows, labels, name, serving, tuple(notes))


def _check_name(place: Path) -> None:
    try:
        check_name("name", place.name)
    except UsageError as error:
        fix = f"Rename the directory, and name in its {TRITON_CONFIG}, if it is there."
        raise UsageError(f"name of {place}", given=place.name, expected=error.expected, fix=fix) from None


def _check_rows(subject: str, rows: int) -> None:
    if not 0 <= rows <= _MOST_ROWS:
        expected, fix = f"0 to {_MOST_ROWS}", "Give a batch size that a board has memory for."
        raise UsageError(f"{subject} max_batch_size", given=rows, expected=expected, fix=fix)


def _notes(config: Config) -> list[str]:
    message, batching = config.message, config.message.dynamic_batching
    notes = [name for name in _NO_PLACE if getattr(message, name)]
    set_fields = {field.name for field, _ in batching.ListFields()}
    notes += [f"dynamic_batching.{name}" for name in _NO_PLACE_IN_BATCHING if name in set_fields]
    if batching.max_queue_delay_microseconds > _MOST_DELAY_US:
        notes.append(f"dynamic_batching.max_queue_delay_microseconds above {_MOST_DELAY_US}")
    return [*config.unknown, *notes]


def _serving(subject: str, message: pb.ModelConfig) -> Serving | None:
    if not message.HasField("dynamic_batching"):
        return None
    batching = message.dynamic_batching
    sizes, most = tuple(batching.preferred_batch_size), message.max_batch_size or _MOST_ROWS
    if len(sizes) > _MOST_SIZES or not all(1 <= size <= most for size in sizes):
        subject, expected = f"{subject} preferred_batch_size", f"at most {_MOST_SIZES} sizes from 1 to {most}"
        fix = "Correct it, or leave it out: Triton, too, takes none above max_batch_size."
        raise UsageError(subject, given=list(sizes), expected=expected, fix=fix)
    delay_us = min(batching.max_queue_delay_microseconds, _MOST_DELAY_US)
    return Serving(max_queue_delay_us=delay_us, preferred_batch_sizes=sizes)


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
