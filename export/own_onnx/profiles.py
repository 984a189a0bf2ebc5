"""Profiles of a graph's inputs, from the batch size and from ``--shape INPUT=MIN:OPT:MAX``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edge.bundles.manifest import Profile
from edge.datatypes import TensorSpec
from edge.errors import Literally, UsageError

#: Input to its smallest, usual and largest shape.
Shapes = dict[str, Profile]
_FORM = "INPUT=MIN:OPT:MAX, each with as many sizes as the input has dimensions, such as ids=1x1:1x32:8x128"


def parse_shapes(given: Sequence[str]) -> Shapes:
    """Return the shapes of ``--shape`` options.

    Raises:
        UsageError: one is not of the form ``INPUT=MIN:OPT:MAX``, or an input has two.
    """
    shapes: Shapes = {}
    for text in given:
        # An input's name may hold a colon, but no equals sign.
        name, _, ranges = text.partition("=")
        try:
            low, middle, high = (_sizes(part) for part in ranges.split(":"))
        except ValueError:
            raise UsageError("--shape", given=text, expected=_FORM, fix="Write it like that.") from None
        if name in shapes:
            raise UsageError("--shape", given=text, expected=f"one --shape for {name!r}", fix="Leave one of them out.")
        shapes[name] = Profile(min=low, opt=middle, max=high)
    return shapes


def profiles(inputs: Sequence[TensorSpec], max_batch_size: int, shapes: Mapping[str, Profile]) -> dict[str, Profile]:
    """Return the profile of each input with a -1; the batch alone needs no ``--shape``.

    Raises:
        UsageError: a shape is missing, superfluous, or does not fit its input.
    """
    dynamic = {spec.name: spec for spec in inputs if -1 in spec.shape}
    for name in shapes:
        if name not in dynamic:
            expected = f"an input with a symbolic dimension, one of {sorted(dynamic)}"
            raise UsageError("--shape", given=name, expected=expected, fix="Correct the name, or leave the option out.")
    return {name: _profile(spec, max_batch_size, shapes.get(name)) for name, spec in dynamic.items()}


def _profile(spec: TensorSpec, max_batch_size: int, given: Profile | None) -> Profile:
    if given is None:
        if -1 in (spec.shape[1:] if max_batch_size else spec.shape):
            rows = max_batch_size or 16
            small, usual, large = (
                "x".join(str(free if size == -1 else size) for size, free in zip(spec.shape, frees, strict=True))
                for frees in (
                    (1,) * len(spec.shape),
                    (1, *(16,) * (len(spec.shape) - 1)),
                    (rows, *(64,) * (len(spec.shape) - 1)),
                )
            )
            fix = f"Add it with the sizes that your requests have, such as --shape {spec.name}={small}:{usual}:{large}"
            subject = f"--shape for input {spec.name!r} {list(spec.shape)}"
            raise UsageError(
                subject, given=Literally("nothing"), expected="its smallest, usual and largest shape", fix=f"{fix}."
            )
        rest = spec.shape[1:]
        return Profile(min=(1, *rest), opt=(1, *rest), max=(max_batch_size, *rest))
    subject = f"--shape for input {spec.name!r}"
    ranges = (given.min, given.opt, given.max)
    if not all(spec.accepts(shape) for shape in ranges):
        fix = "Write a size for every -1, and the graph's own sizes for the others."
        raise UsageError(subject, given=ranges, expected=f"shapes that fit {list(spec.shape)}", fix=fix)
    if not all(a <= b <= c for a, b, c in zip(*ranges, strict=True)):
        raise UsageError(subject, given=ranges, expected="min <= opt <= max in every dimension", fix="Order the sizes.")
    if max_batch_size and given.max[0] != max_batch_size:
        expected = f"{max_batch_size} rows in max, the --max-batch-size"
        raise UsageError(subject, given=given.max, expected=expected, fix="Make the two options agree.")
    return given


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in text.split("x"))
    if not all(1 <= size < 2**31 for size in sizes):
        raise ValueError("a size is below 1 or too large")
    return sizes
