"""Runners that fail as real ones do, and a server that uses one of them.

python -m tests.support.conditions KIND serve REPOSITORY ...   `fewheads serve` with such a runner for every model
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from edge.__main__ import cli
from edge.datatypes import Array, TensorSpec
from edge.repository import loader
from edge.runner import Runner
from edge.runtimes.build import load_with

ILLEGAL = "cuMemcpyDtoHAsync failed: an illegal memory access was encountered"


class Faulty:
    """A lost GPU: an input below -1,000 makes this call and all later ones fail."""

    platform, device = "tensorrt_plan", "GPU"

    def __init__(self, inner: Runner | None = None) -> None:
        """Without a runner inside, the output ``y`` is the input ``x``."""
        self.broken = False
        self.inner = inner
        self.inputs: tuple[TensorSpec, ...] = inner.inputs if inner else ()
        self.outputs: tuple[TensorSpec, ...] = inner.outputs if inner else ()

    def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        if self.broken or feeds["x"].min() < -1_000:
            self.broken = True
            raise RuntimeError(ILLEGAL)
        return self.inner.infer(feeds) if self.inner else {"y": feeds["x"]}

    def close(self) -> None:
        assert not self.broken, "a call on a lost device may never return"


class WornOut(Faulty):
    """A runner that fails from an input below -1,000 until one above 1,000."""

    device = "CPU"

    def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        if feeds["x"].max() > 1_000:
            self.broken = False
        return super().infer(feeds)

    def close(self) -> None:
        pass


def main() -> None:
    kind = {"lost": Faulty, "worn-out": WornOut}[sys.argv.pop(1)]

    def load(*arguments: Any, **options: Any) -> Any:
        loaded = load_with(*arguments, **options)
        return dataclasses.replace(loaded, runner=kind(loaded.runner))

    loader.load_with = load
    cli.main()


if __name__ == "__main__":
    main()
