"""Peak memory of an ONNX file, in a process of its own that imports nothing of torch."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path

from edge.datatypes import Array
from edge.instruments.memory import MemorySampler
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner, import_onnxruntime


def peak_bytes(model: bytes, feeds: Mapping[str, Array]) -> int:
    """Return by how much the peak memory of a process rises when it loads a file and runs it once, with one thread."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.onnx"
        path.write_bytes(model)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(_peak, path, dict(feeds)).result()


def _peak(path: Path, feeds: Mapping[str, Array]) -> int:
    import_onnxruntime()
    before = _peak_rss()
    with closing(OnnxRuntimeRunner(path.read_bytes(), subject="a model to be measured")) as runner:
        runner.infer(feeds)
    return _peak_rss() - before


def _peak_rss() -> int:
    return next(one.size_bytes for one in MemorySampler().sample() if one.kind == "process_peak_rss")
