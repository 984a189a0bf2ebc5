"""The step after a packed detector: which outputs have the logits and the boxes of its queries, and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from msgspec.structs import replace

from edge.bundles.golden import Golden
from edge.bundles.steps import MOST_BOXES, BoxPostprocess
from edge.datatypes import TensorSpec
from edge.errors import Raw, UsageError
from edge.protocol import BOX_PREFIXES
from export.bundle.pack.options import PackOptions
from export.bundle.pack.steps import LABELS_FIX, read_labels, unused

#: What makes scores of the logits of each family, as its image processor in transformers does.
FAMILIES: Final[Mapping[str, Literal["sigmoid", "softmax"]]] = {
    "rt-detr": "sigmoid",
    "rf-detr": "sigmoid",
    "d-fine": "sigmoid",
    "lw-detr": "sigmoid",
    "deformable-detr": "sigmoid",
    "conditional-detr": "sigmoid",
    "detr": "softmax",
    "yolos": "softmax",
}
#: Names of the outputs in exports by Optimum, and by RF-DETR's own package.
_LOGITS, _SHARES = ("logits", "pred_logits", "labels"), ("pred_boxes", "dets")
#: Of a box that is far larger than the picture, a share of its side.
_MOST_SHARE = 4
_EXPORT: Final = "Export the model without its postprocessing, with the outputs 'logits' and 'pred_boxes'."


def boxes_step(options: PackOptions, outputs: Sequence[TensorSpec], model: Path) -> BoxPostprocess:
    """Return the step of ``--detect``; raise a UsageError if the outputs are not those of a detector."""
    assert options.detect
    activation = FAMILIES[options.detect]
    floats = {spec.name: spec.shape for spec in outputs if spec.datatype == "FP32" and len(spec.shape) == 3}
    logits, shares = (next((name for name in names if name in floats), "") for names in (_LOGITS, _SHARES))
    classes = floats[logits][2] - (activation == "softmax") if logits else 0
    if classes < 1 or floats.get(shares) != (*floats[logits][:2], 4):
        raise UsageError(
            f"--detect for {model}",
            given=Raw(", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in outputs)),
            expected="the FP32 outputs 'logits' [batch, queries, classes] and 'pred_boxes' [batch, queries, 4]",
            fix=_EXPORT,
        )
    labels: tuple[str, ...] = ()
    if options.labels:
        subject = f"--labels {options.labels}"
        labels = read_labels(options.labels, subject, least=1)
        if len(labels) != classes:
            beside = " beside that of no object" if activation == "softmax" else ""
            given, expected = Raw(f"{len(labels)} lines"), f"{classes}, as many as {logits!r} has classes{beside}"
            raise UsageError(subject, given=given, expected=expected, fix=LABELS_FIX)
    made, taken = ("boxes", "scores", "classes", "labels"), {spec.name for spec in outputs}
    choices = [[f"{prefix}{one}" for one in made] for prefix in BOX_PREFIXES]
    boxes, scores, kinds, label = unused(choices, taken, f"--detect for {model}")
    return BoxPostprocess(
        logits=logits,
        shares=shares,
        boxes=boxes,
        scores=scores,
        classes=kinds,
        activation=activation,
        label=label if labels else None,
        labels=labels,
    )


def with_limits(step: BoxPostprocess, options: PackOptions, golden: Golden, model: Path) -> BoxPostprocess:
    """Return the step with the limits of the options; without one, as many boxes as there are queries.

    Raise a UsageError if golden outputs are boxes in pixels, or scores in place of logits.
    """
    logits, shares = (golden.outputs[name] for name in step.reads)
    if abs(shares).max() > _MOST_SHARE:
        given = Raw(f"values up to {abs(shares).max():.4g}")
        expected = "centre, width and height as shares of the picture's sides"
        raise UsageError(f"output {step.shares!r} of {model}", given=given, expected=expected, fix=_EXPORT)
    if logits.min() >= 0 and logits.max() <= 1:
        given, expected = Raw("values from 0 to 1 alone"), f"logits, before the {step.activation}"
        raise UsageError(f"output {step.logits!r} of {model}", given=given, expected=expected, fix=_EXPORT)
    threshold = step.threshold if options.threshold is None else options.threshold
    return replace(step, threshold=threshold, top_k=options.top_k or min(logits.shape[1], MOST_BOXES))
