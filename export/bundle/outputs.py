"""Rules for the paths that commands write to.

No command overwrites its inputs: an output is never equal to an input, inside of one, or a directory that contains one,
with symbolic links resolved. An earlier result is replaced only with ``--replace``. Commands check this before they
load torch; the writers themselves replace whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from edge.bench.profile import SHAPES_NAME
from edge.bundles.fields import ModelName
from edge.bundles.manifest import MANIFEST_NAME
from edge.errors import Raw, UsageError
from export.training.runs import is_run

#: Of a model in a model repository of Triton.
TRITON_CONFIG = "config.pbtxt"
#: Paths by the name of the option or argument that gave them; None where it was not given.
Inputs = Mapping[str, Path | None]


def check_run(option: str, path: Path, inputs: Inputs, *, replace: bool, way_out: str = "another --out") -> None:
    """Check the path of a new run directory.

    Raises:
        UsageError: the path overlaps an input, cannot be written, holds an earlier run and ``replace`` is not set, or
            holds something that is not a run.
    """
    check_directory(option, path, inputs, is_run, "run", replace, way_out)


def check_directory(
    option: str, path: Path, inputs: Inputs, is_ours: Callable[[Path], bool], what: str, replace: bool, way_out: str
) -> None:
    """Check the path of a new directory of a kind, ``what``, which ``is_ours`` knows; errors as :func:`check_run`."""
    _check_apart(option, path, inputs, way_out)
    _check_writable(option, path, way_out)
    if not os.path.lexists(path):
        return
    if not is_ours(path):
        given, expected = Raw(f"something that is not a {what}"), f"a free path or an earlier {what}"
        raise UsageError(f"{option} {path}", given=given, expected=expected, fix=f"Give {way_out}.")
    if not replace:
        raise _existing(option, path, f"an existing {what}", way_out)


def check_free(option: str, path: Path, inputs: Inputs) -> None:
    """Check a path where nothing is replaced; arguments and errors as :func:`check_run`."""
    way_out = f"another {option}"
    _check_apart(option, path, inputs, way_out)
    _check_writable(option, path, way_out)
    if os.path.lexists(path):
        given, fix = Raw("an existing file or directory"), f"Give {way_out}."
        raise UsageError(f"{option} {path}", given=given, expected="a free path", fix=fix)


def check_shapes(option: str, path: Path, inputs: Inputs, *, replace: bool) -> None:
    """Check the path of a new directory of layer shapes; arguments and errors as :func:`check_run`."""
    what, way_out = "directory of shapes", f"another {option}"
    check_directory(option, path, inputs, lambda path: (path / SHAPES_NAME).is_file(), what, replace, way_out)


def check_results(option: str, path: Path, inputs: Inputs, *, files: Collection[str], what: str, replace: bool) -> None:
    """Check the path of a directory with these files and no others; other arguments and errors as :func:`check_run`."""

    def is_ours(path: Path) -> bool:
        return path.is_dir() and {entry.name for entry in path.iterdir()} == {*files}

    check_directory(option, path, inputs, is_ours, what, replace, f"another {option}")


def check_bundle(path: Path, inputs: Inputs, *, replace: bool) -> None:
    """Check the path of a new bundle, ``REPOSITORY/NAME-VERSION``."""
    name = path.name.rpartition("-")[0]
    versions = (other.name.rpartition("-")[2] for other in path.parent.glob(f"{name}-*"))
    free = max((int(version) for version in versions if version.isdecimal()), default=0) + 1
    way_out = f"--version {free}, or another --repository"
    check_directory("bundle", path, inputs, lambda path: (path / MANIFEST_NAME).is_file(), "bundle", replace, way_out)


def check_triton_model(path: Path, inputs: Inputs, *, replace: bool) -> None:
    """Check the path of a new model of Triton, ``REPOSITORY/NAME``; arguments and errors as :func:`check_run`."""
    way_out = "another --name or --repository"
    check_directory(
        "model", path, inputs, lambda path: (path / TRITON_CONFIG).is_file(), "model of Triton", replace, way_out
    )


def check_name(option: str, name: str | None) -> str:
    """Return the name of a model or tier; raise a UsageError if it is missing, or not allowed in a bundle."""
    try:
        return msgspec.convert(name, ModelName)
    except msgspec.ValidationError:
        given = Raw("nothing") if name is None else name
        expected = "lower-case letters, digits, '.', '_' and '-', 64 at most, the first a letter or digit"
        raise UsageError(option, given=given, expected=expected, fix=f"Give {option}, such as my-model.") from None


def check_file(option: str, path: Path, inputs: Inputs, *, replace: bool) -> None:
    """Check the path of a new file in an existing directory; arguments and errors as :func:`check_run`."""
    way_out = f"another {option}"
    _check_apart(option, path, inputs, way_out)
    if not path.resolve().parent.is_dir():
        given, expected = Raw("no such directory"), "a file to write in an existing directory"
        raise UsageError(f"{option} {path}", given=given, expected=expected, fix=f"Make it, or give {way_out}.")
    _check_writable(option, path, way_out)
    if os.path.lexists(path) and not replace:
        raise _existing(option, path, "an existing file", way_out)


def check_workspace(option: str, path: Path, inputs: Inputs, *, settings: str) -> None:
    """Check the directory of an experiment, which resumes and never replaces anything.

    Args:
        settings: name of the file, or directory, by which the command recognises its own experiment.

    Raises:
        UsageError: the path overlaps an input, cannot be written, or holds files of something else.
    """
    way_out = f"another {option}"
    _check_apart(option, path, inputs, way_out)
    _check_writable(option, path / settings, way_out)
    if path.is_dir() and any(path.iterdir()) and not any(path.glob(settings)):
        given, expected = Raw("a directory with other files"), "an empty path or an earlier experiment"
        raise UsageError(f"{option} {path}", given=given, expected=expected, fix=f"Give {way_out}.")


def _check_apart(option: str, path: Path, inputs: Inputs, way_out: str) -> None:
    for name, other in inputs.items():
        relation = other and _relation(path.resolve(), other.resolve())
        if relation:
            given = Raw(f"{relation} {name}" if name.endswith(str(other)) else f"{relation} {name} {other}")
            expected = "a path apart from everything else that the command reads or writes"
            raise UsageError(f"{option} {path}", given=given, expected=expected, fix=f"Give {way_out}.")


def _relation(path: Path, other: Path) -> str | None:
    if _same(path, other):
        return "the path of"
    if any(_same(parent, other) for parent in path.parents):
        return "a path inside of"
    if any(_same(path, parent) for parent in other.parents):
        return "a directory that holds"
    return None


def _same(one: Path, other: Path) -> bool:
    # samefile also detects hard links, bind mounts and file systems that ignore case.
    return one == other or (os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other))


def _check_writable(option: str, path: Path, way_out: str) -> None:
    nearest = next(parent for parent in path.resolve().parents if os.path.exists(parent))
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return
    given = Raw(f"{nearest}, which is {'not writable' if nearest.is_dir() else 'not a directory'}")
    raise UsageError(f"{option} {path}", given=given, expected="a directory to write in", fix=f"Give {way_out}.")


def _existing(option: str, path: Path, what: str, way_out: str) -> UsageError:
    fix = f"Give --replace to replace it, or {way_out}."
    return UsageError(f"{option} {path}", given=Raw(what), expected="a free path", fix=fix)
