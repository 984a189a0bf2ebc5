"""Labels of a packed classifier, from a file with one in each line.

Labels may repeat: ImageNet has two classes "crane", a bird and a machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from edge.bundles.fields import MOST_CHARACTERS
from edge.bundles.steps import LabelPostprocess, Labels
from edge.datatypes import TensorSpec
from edge.errors import Raw, UsageError

_LINES = "2 to 4096 lines of UTF-8"
_FIX = "Write the label of each column in a line of its own, in the order of the columns."


def label_step(path: Path, outputs: Sequence[TensorSpec], model: Path) -> LabelPostprocess:
    """Return the step that names the largest logit of the one FP32 output with a column for each label.

    Raises:
        UsageError: the file cannot be read, a line is empty or too long, or no output, or more than one, has a column
            for each label.
    """
    subject = f"--labels {path}"
    labels = _read_labels(path, subject)
    shapes = {spec.name: list(spec.shape) for spec in outputs if spec.datatype == "FP32"}
    fitting = [name for name, shape in shapes.items() if shape == [-1, len(labels)]]
    if len(fitting) != 1:
        given = Raw(f"{len(labels)} lines")
        expected = f"as many as one of the FP32 outputs of {model} has columns, {shapes}"
        raise UsageError(subject, given=given, expected=expected, fix=_FIX)
    taken = {spec.name for spec in outputs}
    name = next(one for one in ("label", "predicted_label") if one not in taken)
    return LabelPostprocess(logits=fitting[0], output=name, labels=labels)


def _read_labels(path: Path, subject: str) -> Labels:
    try:
        # Excel and Notepad begin UTF-8 with a byte order mark. splitlines would also split at U+2028 and U+0085.
        lines = path.read_bytes().decode("utf-8-sig").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        given = Raw(error.strerror if isinstance(error, OSError) else error)
        raise UsageError(subject, given=given, expected=_LINES, fix=_FIX) from None
    labels = [line.rstrip("\r") for line in lines]
    for number, label in enumerate(labels, 1):
        if not label.strip() or len(label) > MOST_CHARACTERS:
            expected = f"a label of 1 to {MOST_CHARACTERS} characters, not only spaces"
            raise UsageError(f"{subject} line {number}", given=label, expected=expected, fix=_FIX)
    try:
        return msgspec.convert(labels, Labels)
    except msgspec.ValidationError:
        raise UsageError(subject, given=Raw(f"{len(labels)} lines"), expected=_LINES, fix=_FIX) from None
