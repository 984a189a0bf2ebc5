"""Memory of a model in a fresh process: ``python -m export.papers.calculator.comparison.memory BUNDLE``."""

from __future__ import annotations

import sys
from pathlib import Path

from edge.bundles.bundle import Bundle
from edge.instruments.memory import MemorySampler
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner

#: Copies that are loaded, after a first one.
_COPIES = 4


def main(path: Path) -> None:
    """Print the bytes of resident memory that each further copy of a bundle's model adds to the process.

    The first copy does not count: with it come the parts of the runtime that every model of that kind shares. A copy
    has answered a request of one row.
    """
    bundle = Bundle.open(path)
    feeds = {name: array[:1] for name, array in bundle.golden.inputs.items()}
    model = bundle.read(bundle.artifact("onnxruntime").file)
    runners, before = [], 0
    for _ in range(1 + _COPIES):
        runners.append(OnnxRuntimeRunner(model, subject=bundle.manifest.name))
        runners[-1].infer(feeds)
        before = before or _resident()
    print((_resident() - before) // _COPIES)


def _resident() -> int:
    return next(reading.size_bytes for reading in MemorySampler().sample() if reading.kind == "process_rss")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
