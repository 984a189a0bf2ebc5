"""Profiles of a graph's inputs, from the batch size and from ``--shape INPUT=MIN:OPT:MAX``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edge.bundles.manifest import Profile
from edge.datatypes import TensorSpec
from edge.errors import Raw, UsageError

#: Input to its smallest, usual and largest shape.
Shapes = dict[str, Profile]
#: Dimensions of a batch of images, and the sizes that an example gives them (True) and other tensors.
_IMAGES = 4
_EXAMPLES = {True: (32, 224, 640), False: (1, 16, 64)}
_FORM = "INPUT=MIN:OPT:MAX, each with as many sizes as the input has dimensions, such as ids=1x1:1x32:8x128"


def parse_shapes(given: Sequence[str]) -> Shapes:
    """Return the shapes of ``--shape`` options; raise a UsageError for another form, or two of an input."""
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


def profiles(
    inputs: Sequence[TensorSpec],
    dimensions: Mapping[str, Sequence[str]],
    max_batch_size: int,
    shapes: Mapping[str, Profile],
) -> dict[str, Profile]:
    """Return the profile of each input with a -1; the batch alone needs no ``--shape``.

    Args:
        dimensions: of each input: a size, or the name of a dynamic dimension.

    Raises:
        UsageError: shapes are missing, superfluous, or do not fit their inputs.
    """
    dynamic = {spec.name: spec for spec in inputs if -1 in spec.shape}
    for name in shapes:
        if name not in dynamic:
            expected = f"an input with a symbolic dimension, one of {sorted(dynamic)}"
            raise UsageError("--shape", given=name, expected=expected, fix="Correct the name, or leave the option out.")
    first = 1 if max_batch_size else 0
    missing = [spec for name, spec in dynamic.items() if name not in shapes and -1 in spec.shape[first:]]
    if missing:
        raise _missing(missing, dimensions, max_batch_size)
    return {name: _profile(spec, max_batch_size, shapes.get(name)) for name, spec in dynamic.items()}


def _missing(specs: Sequence[TensorSpec], dimensions: Mapping[str, Sequence[str]], max_batch_size: int) -> UsageError:
    """Return the error that asks for the dynamic dimensions by their names, with the options to copy."""
    wanted, options = [], []
    for spec in specs:
        names = [name for name, size in zip(dimensions[spec.name], spec.shape, strict=True) if size == -1]
        asked = ", ".join(names[1:] if max_batch_size else names)
        wanted.append(f"{asked} of input {spec.name!r} [{', '.join(dimensions[spec.name])}]")
        sizes = _EXAMPLES[len(spec.shape) == _IMAGES]
        rows = (1, 1, max_batch_size) if max_batch_size else sizes
        ranges = (
            "x".join(str(own if own != -1 else size if place else row) for place, own in enumerate(spec.shape))
            for size, row in zip(sizes, rows, strict=True)
        )
        options.append(f"--shape {spec.name}={':'.join(ranges)}")
    expected = f"the smallest, usual and largest {' and '.join(wanted)}"
    fix = f"Add them with the sizes that your requests have, such as {' '.join(options)}"
    return UsageError("--shape", given=Raw("nothing"), expected=expected, fix=fix)


def _profile(spec: TensorSpec, max_batch_size: int, given: Profile | None) -> Profile:
    if given is None:
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
