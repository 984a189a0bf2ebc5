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
from tests.edge.test_leaks import serving_here
from tests.edge.test_status_codes import good

HOUSE = str(Path(edge.__file__).parent)
#: Half of the 31 files that it took when each transport, and the short way of small requests, had code of its own.
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
async def test_a_batched_request_enters_few_files(tmp_path: Path, transport: str) -> None:
    walk = Walk()
    threading.setprofile(walk)
    sys.setprofile(walk)
    try:
        async with serving_here(tmp_path, transport, target="simulated:20") as channel:
            call = channel.unary_unary(f"/{INFERENCE}/ModelInfer")
            message = good().SerializeToString()
            await call(message, timeout=10)  # from now on its form is known
            walk.recording = True
            await asyncio.gather(*(call(message, timeout=10) for _ in range(3)))
            walk.recording = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    transports = {file for file in walk.files if file.startswith(("grpcio/", "http2/"))}
    print(transport, len(walk.files), sorted(walk.files))
    assert len(walk.files - transports) <= MOST_FILES, sorted(walk.files)
