"""Boxes around objects: the likeliest ones of a detector, in the pixels of the pictures that clients sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from edge.bundles.steps import BoxPostprocess
from edge.datatypes import Array


class Picture(NamedTuple):
    """A picture that a client sent, and its place in the square of pixels that the graph reads.

    Attributes:
        size: its width and height, upright.
        resized: those of it in the square, in pixels of the square.
        corner: its left and upper side there; negative where the square shows less than all of it.
        side: of the square.
    """

    size: tuple[int, int]
    resized: tuple[int, int]
    corner: tuple[int, int]
    side: int

    def corners(self, shares: Array) -> Array:
        """Return x1, y1, x2, y2 in pixels of the picture, [boxes, 4], which may be outside of it.

        Args:
            shares: the centre's x and y, width and height, as shares of the square's sides, [boxes, 4].
        """
        centres, halves = shares[:, :2].astype(np.float64), shares[:, 2:].astype(np.float64) / 2
        size, resized, corner = (np.array(pair, np.float64) for pair in (self.size, self.resized, self.corner))
        scale = self.side / resized * size  # exactly the size of a picture that fills the square
        ends = [places * scale - corner / resized * size for places in (centres - halves, centres + halves)]
        return np.concatenate(ends, axis=1)


def extract(
    step: BoxPostprocess, logits: Array, shares: Array, pictures: Sequence[Picture], threshold: float, top_k: int
) -> dict[str, Array]:
    """Return the outputs of a step: for each picture its likeliest boxes, the likeliest first, [pictures, boxes, …].

    Each has a score above ``threshold``, and there are at most ``top_k``. Behind the last box of a picture, classes
    are -1, texts empty, and the other numbers 0.

    Args:
        logits: finite, [pictures, queries, classes], without an object in the last class of a softmax.
        shares: of each query's box, finite, [pictures, queries, 4], as :meth:`Picture.corners` takes them.
    """
    found = [_likeliest(step, of_picture, threshold, top_k) for of_picture in logits]
    shape = len(found), max(len(scores) for _, _, scores in found)
    boxes, scores = np.zeros((*shape, 4), np.float32), np.zeros(shape, np.float32)
    classes = np.full(shape, -1, np.int32)
    for row, (picture, (queries, of_row, sure)) in enumerate(zip(pictures, found, strict=True)):
        boxes[row, : len(queries)] = picture.corners(shares[row, queries])
        scores[row, : len(queries)], classes[row, : len(queries)] = sure, of_row
    outputs: dict[str, Array] = {step.boxes: boxes, step.scores: scores, step.classes: classes}
    if step.label:
        texts = np.array([*(label.encode() for label in step.labels), b""], np.object_)
        outputs[step.label] = texts[classes]  # -1 is the last
    return outputs


def _likeliest(step: BoxPostprocess, logits: Array, threshold: float, top_k: int) -> tuple[Array, Array, Array]:
    """Return queries, classes and scores of the likeliest boxes, as Transformers' ``post_process_object_detection``.

    With a sigmoid, a query may have several classes; with a softmax, it has its likeliest.
    """
    logits = logits.astype(np.float64)
    if step.activation == "softmax":
        scores = np.exp(logits[:, :-1].max(axis=1) - np.logaddexp.reduce(logits, axis=1))
    else:
        with np.errstate(over="ignore"):  # to an infinity, whose score is 0
            scores = 1 / (1 + np.exp(-logits.ravel()))
    kept = np.flatnonzero(scores > threshold)
    kept = kept[np.argsort(-scores[kept], kind="stable")[:top_k]]
    if step.activation == "softmax":
        return kept, logits[kept, :-1].argmax(axis=1), scores[kept]
    queries, classes = np.divmod(kept, logits.shape[1])
    return queries, classes, scores[kept]
