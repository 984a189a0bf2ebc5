"""Sizes of the inputs that latencies are predicted for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edge.bundles.manifest import Profile
from edge.datatypes import TensorSpec
from edge.errors import UsageError

#: Where a bundle takes them, and nobody asks for others.
USUAL_LENGTHS = (32, 128)
USUAL_BATCHES = (1, 8)


def check_batches(max_batch_size: int, batches: Sequence[int]) -> None:
    """Raise a UsageError if a bundle takes fewer rows at once."""
    for batch in batches:
        if batch > max(max_batch_size, 1):
            expected = f"at most {max(max_batch_size, 1)}, as the bundle has it"
            raise UsageError("--batch", given=batch, expected=expected, fix="Give a smaller batch.")


def check_sizes(
    inputs: Sequence[TensorSpec],
    profile: Mapping[str, Profile],
    max_batch_size: int,
    lengths: Sequence[int],
    batches: Sequence[int],
) -> list[tuple[int, int | None]]:
    """Return every pair of rows and tokens; tokens are None where the inputs have no dimension of tokens.

    They have one if no input has several free dimensions beside the batch, and all such dimensions have one range.

    Args:
        lengths: tokens; empty for the usual ones, as far as the model takes them.

    Raises:
        UsageError: the model does not take inputs of such a size.
    """
    check_batches(max_batch_size, batches)
    first = 1 if max_batch_size else 0
    free = {spec.name: [axis for axis in range(first, len(spec.shape)) if spec.shape[axis] == -1] for spec in inputs}
    ranges = {
        tuple(shape[axes[0]] for shape in (profile[name].min, profile[name].opt, profile[name].max))
        for name, axes in free.items()
        if axes
    }
    if len(ranges) != 1 or any(len(axes) > 1 for axes in free.values()):
        return [(batch, None) for batch in batches]
    ((least, opt, most),) = ranges
    name = next(name for name, axes in free.items() if axes)
    for tokens in lengths:
        if not least <= tokens <= most:
            expected = f"{least} to {most}, as the bundle takes {name!r}"
            raise UsageError("--lengths", given=tokens, expected=expected, fix="Give lengths in this range.")
    usual = tuple(tokens for tokens in USUAL_LENGTHS if least <= tokens <= most) or (opt,)
    return [(batch, tokens) for tokens in lengths or usual for batch in batches]


def input_shapes(
    inputs: Sequence[TensorSpec], profile: Mapping[str, Profile], max_batch_size: int, batch: int, tokens: int | None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the inputs of a run.

    Args:
        max_batch_size: of its bundle; 0 where the first dimension is not a batch.
        tokens: of each row; None for the dimensions that the model is tuned for.
    """
    shapes = {}
    for spec in inputs:
        usual = profile[spec.name].opt if -1 in spec.shape else spec.shape
        sizes = [(tokens or opt) if size == -1 else size for size, opt in zip(spec.shape, usual, strict=True)]
        if max_batch_size:
            sizes[0] = batch
        shapes[spec.name] = tuple(sizes)
    return shapes
