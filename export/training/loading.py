"""Import of torch, which takes seconds, with a progress bar."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from edge.cli.output import working


@contextmanager
def loading_torch(what: str = "loading torch") -> Iterator[None]:
    """Show a bar while the block imports modules that need torch, and set torch to one thread.

    One thread gives the same sums on every machine, and the matrices here are too small to gain from a second one.
    """
    with working(what):
        import torch

        torch.set_num_threads(1)
        yield


@contextmanager
def all_cores(wanted: bool) -> Iterator[None]:
    """Let torch use every core while the block runs, if it is ``wanted``: for minutes of large batches, not for few."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)) if wanted else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
