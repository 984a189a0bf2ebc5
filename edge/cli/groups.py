"""The groups of commands in ``fewheads --help`` and in the README, in their order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

#: Heading to commands. `edge` never imports `export`, so that these are names of entry points.
GROUPS: Final = {
    "Train and shrink": ("train", "finetune", "report", "language", "reduce", "shapes", "plan"),
    "Experiments": ("compare", "frontier", "route", "looped", "calculator"),
    "Export and build": ("export", "estimate", "build", "profile"),
    "Serve and ask": ("serve", "infer", "token"),
    "Measure and inspect": ("bench", "goodput", "top", "info", "doctor"),
}
#: Heading of commands without a group, such as those of other packages.
OTHER: Final = "Other"


def grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the commands by heading, in the order of the help; groups without any of them are left out."""
    left = list(names)
    groups = {heading: [name for name in group if name in left] for heading, group in GROUPS.items()}
    known = {name for group in groups.values() for name in group}
    groups[OTHER] = sorted(name for name in left if name not in known)
    return {heading: group for heading, group in groups.items() if group}
