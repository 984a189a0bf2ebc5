"""Optimization profiles of an engine: buckets along its sequence axis, each tuned for its own length.

TensorRT tunes a profile for one shape, ``opt``, and computes the other shapes of the profile with the same kernels. An
engine tuned for 128 tokens is slow for 16, and one tuned for 16 is slow for 128. So a wide sequence axis gets a
profile for each power of two from :data:`SHORTEST` on: an axis from 1 to 512 gets 1..32, 33..64, 65..128, 129..256 and
257..512. Each is tuned for its longest sequence, the shape to pad to, and for the manifest's ``opt`` of every other
axis.

The sequence axis is the only dynamic axis after the batch. If inputs have none, or several that differ (as height and
width of an image do), the manifest's profile is the only one. Where a manifest has several for a file, such as those of
a decoder for prompts and for single tokens, they are the engine's as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edge.bundles.manifest import Profile

#: The longest sequence of the first bucket.
SHORTEST = 32
#: Each profile costs build time and memory. The last one covers all longer sequences.
MOST = 6

#: Input name to profile.
Profiles = Mapping[str, Profile]


def optimization_profiles(profile: Profiles, more: Sequence[Profiles] = ()) -> tuple[Profiles, ...]:
    """Return the optimization profiles for those of an ONNX file in the manifest; none for fixed shapes."""
    return (profile, *more) if more else buckets(profile)


def buckets(profile: Profiles) -> tuple[Profiles, ...]:
    """Return the optimization profiles for the manifest's one, the shortest sequences first; none for fixed shapes."""
    if not profile:
        return ()
    axes = {
        (axis, low, high)
        for shapes in profile.values()
        for axis, (low, high) in enumerate(zip(shapes.min, shapes.max, strict=True))
        if axis and low != high
    }
    if len(axes) != 1:
        return (profile,)
    ((axis, low, high),) = axes
    sizes = (SHORTEST << power for power in range(high.bit_length()))
    bounds = [*[size for size in sizes if low <= size < high][: MOST - 1], high]
    starts = [low, *(bound + 1 for bound in bounds[:-1])]
    return tuple(
        {name: _cut(shapes, axis, start, bound) for name, shapes in profile.items()}
        for start, bound in zip(starts, bounds, strict=True)
    )


def described(profile: Profiles) -> str:
    """Return the shapes of a profile on one line, such as ``input_ids 1x1..1x32..8x32``."""
    return ", ".join(
        f"{name} {'..'.join('x'.join(map(str, shape)) for shape in (shapes.min, shapes.opt, shapes.max))}"
        for name, shapes in sorted(profile.items())
    )


def _cut(shapes: Profile, axis: int, start: int, bound: int) -> Profile:
    """Return a profile with one axis cut to a bucket; an input without this axis keeps its shapes."""
    if len(shapes.min) <= axis or shapes.min[axis] == shapes.max[axis]:
        return shapes

    def at(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        return (*shape[:axis], size, *shape[axis + 1 :])

    return Profile(min=at(shapes.min, start), opt=at(shapes.opt, bound), max=at(shapes.max, bound))
