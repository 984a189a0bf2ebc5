"""The files that one ModelInfer enters on its way: few enough to be read in one sitting."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import edge
from edge.protocol import INFERENCE
from edge.settings import TRANSPORTS
from tests.edge.in_process import serving_here
from tests.edge.sample_requests import good

HOUSE = str(Path(edge.__file__).parent)
#: It was 31 when each transport, and a short way for small requests, had code of its own.
MOST_FILES = 15


class Walk:
    """Notes the files whose functions are entered, on all threads that begin after it."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.recording = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if self.recording and event == "call" and name.startswith(HOUSE):
            self.files.add(name[len(HOUSE) + 1 :])


@pytest.mark.parametrize("transport", TRANSPORTS[1:])
async def test_a_batched_request_enters_few_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    for module in ("supervisor", "watchdog"):  # which look at the server now and then, whatever is requested
        monkeypatch.setattr(f"edge.health.{module}._LOOK_SECONDS", 60)
    walk = Walk()
    threading.setprofile(walk)
    sys.setprofile(walk)
    try:
        async with serving_here(tmp_path, transport, target="simulated:20") as channel:
            call = channel.unary_unary(f"/{INFERENCE}/ModelInfer")
            message = good().SerializeToString()
            await call(message)  # from now on its form is known
            await asyncio.sleep(0.2)
            walk.recording = True
            await asyncio.gather(*(call(message) for _ in range(3)))
            walk.recording = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    # The transport's own files and the simulation around ONNX Runtime are not part of the way that all requests share.
    shared = {file for file in walk.files if not file.startswith(("http2/", "runtimes/simulated"))}
    assert len(shared) <= MOST_FILES, " ".join(sorted(shared))
    assert {"serving/inference.py", "scheduling/runs.py", "scheduling/batching.py"} <= shared  # it was joined
