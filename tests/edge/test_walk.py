"""Number of files that one ModelInfer enters on its way: few enough to be read in one sitting."""

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
from tests.support.in_process import serving_here
from tests.support.sample_requests import good

EDGE = str(Path(edge.__file__).parent)
#: Limit for a batched request, by transport: of a known form, and of a new one. CONTRIBUTING.md names the files.
MOST_FILES = {"grpcio": (14, 21), "nghttp2": (21, 29)}


@pytest.mark.parametrize("transport", MOST_FILES)
@pytest.mark.parametrize("known", [True, False])
async def test_batched_request_enters_few_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, known: bool
) -> None:
    files: set[str] = set()
    recording = threading.Event()

    def walk(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(EDGE) and recording.is_set():
            files.add(name[len(EDGE) + 1 :])

    monkeypatch.setattr("edge.health.supervisor._LOOK_SECONDS", 60)  # it looks at the server from time to time
    threading.setprofile(walk)
    sys.setprofile(walk)
    try:
        async with serving_here(tmp_path, transport, target="simulated:20") as channel:
            call = channel.unary_unary(f"/{INFERENCE}/ModelInfer")
            message = good().SerializeToString()
            if known:
                await call(message)
            else:
                await channel.unary_unary(f"/{INFERENCE}/ServerLive")(b"")  # connects
            await asyncio.sleep(0.2)
            recording.set()
            await asyncio.gather(*(call(message) for _ in range(3)))
            recording.clear()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    files -= {"runtimes/simulated.py"}  # around ONNX Runtime, as if it were a GPU
    assert len(files) <= MOST_FILES[transport][0 if known else 1], " ".join(sorted(files))
    assert {"serving/inference.py", "scheduling/runs.py", "scheduling/batching.py"} <= files  # it was joined
