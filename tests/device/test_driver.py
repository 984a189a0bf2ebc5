"""The software driver catches what a real device punishes, through the real pycuda."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pycuda.driver as cuda
import pytest

from tests.device.software import Kernel, SoftwareDriver

ONES = np.ones(16, np.float32)


@pytest.fixture
def context() -> Iterator[cuda.Context]:
    made = cuda.Device(0).make_context()
    yield made
    gc.collect()
    made.pop()
    made.detach()


@pytest.fixture
def pinned(context: cuda.Context) -> Iterator[np.ndarray]:
    yield cuda.pagelocked_empty(16, np.float32)


@pytest.mark.usefixtures("context")
def test_a_copy_is_done_when_its_stream_is_synchronised(software: SoftwareDriver) -> None:
    stream, memory = cuda.Stream(), cuda.mem_alloc(ONES.nbytes)
    source, result = cuda.pagelocked_empty(16, np.float32), cuda.pagelocked_zeros(16, np.float32)
    source[:] = 1
    cuda.memcpy_htod_async(memory, source, stream)
    cuda.memcpy_dtoh_async(result, memory, stream)
    assert not result.any()
    assert software.pending() == 2
    stream.synchronize()
    assert (result == 1).all()
