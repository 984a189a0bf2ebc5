"""Sizes of the inputs that latencies are predicted for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from edge.bundles.manifest import Profile
from edge.datatypes import TensorSpec
from edge.errors import UsageError
from export.estimate.devices import BoardMode
from export.estimate.operations import work_of
from export.estimate.roofline import Prediction, predict

#: Where a bundle takes them, and nobody asks for others.
USUAL_LENGTHS = (32, 128)
USUAL_BATCHES = (1, 8)


class SizedPrediction(NamedTuple):
    """The latency of one run for inputs of one size; ``tokens`` is None where the inputs have a fixed size."""

    rows: int
    tokens: int | None
    prediction: Prediction


def predict_usual_sizes(
    model: bytes,
    inputs: Sequence[TensorSpec],
    profile: Mapping[str, Profile],
    max_batch_size: int,
    target: BoardMode,
    subject: str = "model",
) -> tuple[SizedPrediction, ...]:
    """Predict the latency of an ONNX file for TensorRT for 32 and 128 tokens, each in batches of 1 and 8.

    Sizes that the model does not take are left out; without free dimensions, only the batches remain. No engine is
    built: the graph's structure gives the number of kernels.

    Args:
        model: the ONNX file, with standard operators, in FP16 or INT8.
        inputs: with the batch first, unless ``max_batch_size`` is 0.
        profile: the shapes of each input with a free dimension.
        max_batch_size: 0 where the first dimension is not a batch.
        subject: the model, for errors.

    Raises:
        BundleError: a product's shape does not follow from the inputs' shapes, or the operators are not standard.
    """
    batches = [batch for batch in USUAL_BATCHES if batch <= max(max_batch_size, 1)]
    found = []
    for batch, tokens in check_sizes(inputs, profile, max_batch_size, (), batches):
        work = work_of(model, input_shapes(inputs, max_batch_size, batch, tokens), subject)
        found.append(SizedPrediction(batch, tokens, predict(work, None, target.mode)))
    return tuple(found)


def check_sizes(
    inputs: Sequence[TensorSpec],
    profile: Mapping[str, Profile],
    max_batch_size: int,
    lengths: Sequence[int],
    batches: Sequence[int],
) -> list[tuple[int, int | None]]:
    """Return every pair of rows and tokens; tokens are None where the inputs have no other dimension to choose.

    Args:
        lengths: tokens; empty for the usual ones, as far as the model takes them.

    Raises:
        UsageError: the model does not take inputs of such a size.
    """
    for batch in batches:
        if batch > max(max_batch_size, 1):
            expected = f"at most {max(max_batch_size, 1)}, as the bundle has it"
            raise UsageError("--batch", given=batch, expected=expected, fix="Give a smaller batch.")
    axis = 1 if max_batch_size else 0
    free = [spec for spec in inputs if -1 in spec.shape[axis:]]
    if not free:
        return [(batch, None) for batch in batches]
    name = free[0].name
    allowed = profile[name]
    position = free[0].shape.index(-1, axis)
    least, most = allowed.min[position], allowed.max[position]
    for tokens in lengths:
        if not least <= tokens <= most:
            expected = f"{least} to {most}, as the bundle takes {name!r}"
            raise UsageError("--lengths", given=tokens, expected=expected, fix="Give lengths in this range.")
    usual = tuple(tokens for tokens in USUAL_LENGTHS if least <= tokens <= most) or (allowed.opt[position],)
    return [(batch, tokens) for tokens in lengths or usual for batch in batches]


def input_shapes(
    inputs: Sequence[TensorSpec], max_batch_size: int, batch: int, tokens: int | None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the inputs of a run.

    Args:
        max_batch_size: of its bundle; 0 where the first dimension is not a batch.
        tokens: of each row; None where the inputs have no other dimension to choose.
    """
    shapes = {}
    for spec in inputs:
        sizes = list(spec.shape)
        if max_batch_size:
            sizes[0] = batch
        shapes[spec.name] = tuple(tokens or 1 if size == -1 else size for size in sizes)
    return shapes
