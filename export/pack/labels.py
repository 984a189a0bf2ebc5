"""Labels of a packed classifier, from a file with one in each line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from edge.bundles.manifest import LabelPostprocess, Labels
from edge.datatypes import TensorSpec
from edge.errors import Literally, UsageError


def label_step(path: Path, outputs: Sequence[TensorSpec], model: Path) -> LabelPostprocess:
    """Return the step that names the largest logit of the one FP32 output with a column for each label.

    Raises:
        UsageError: the file cannot be read, or no output, or more than one, has a column for each label.
    """
    subject = f"--labels {path}"
    fix = "Write the label of each column in a line of its own, in the order of the columns."
    try:
        labels = msgspec.convert(path.read_text("utf-8").splitlines(), Labels)
    except (OSError, UnicodeDecodeError, msgspec.ValidationError) as error:
        given = Literally(error.strerror if isinstance(error, OSError) else error)
        raise UsageError(subject, given=given, expected="2 to 4096 lines of UTF-8", fix=fix) from None
    shapes = {spec.name: list(spec.shape) for spec in outputs if spec.datatype == "FP32"}
    fitting = [name for name, shape in shapes.items() if shape == [-1, len(labels)]]
    if len(fitting) != 1:
        given = Literally(f"{len(labels)} lines")
        expected = f"as many as one of the FP32 outputs of {model} has columns, {shapes}"
        raise UsageError(subject, given=given, expected=expected, fix=fix)
    taken = {spec.name for spec in outputs}
    name = next(one for one in ("label", "predicted_label") if one not in taken)
    return LabelPostprocess(logits=fitting[0], output=name, labels=labels)
