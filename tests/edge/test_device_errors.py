"""Fatal CUDA errors in messages of CUDA and of runtimes that quote it."""

from __future__ import annotations

import pytest

from edge.errors import InvalidRequest, Literally, RunnerError
from edge.runtimes.device_errors import fatal, fatal_name, is_out_of_memory

LOST = [
    "cuGraphLaunch failed: CUDA_ERROR_ILLEGAL_ADDRESS (700), an illegal memory access was encountered",
    "cuStreamEndCapture failed: CUDA_ERROR_UNKNOWN (999), unknown error",
    "cuMemcpyDtoHAsync failed: an illegal memory access was encountered",
    "cuStreamSynchronize failed: unspecified launch failure",
    "cuCtxSynchronize failed: unknown error",
    "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=jetson",
    "CUDA failure 719: x",
    "CUDA error: device-side assert triggered",
    "CUDA error code=710",
    "Cuda failure: 716",
    "[checkMacros.cpp::catchCudaError::203] Error Code 1: Cuda Runtime (misaligned address)",
    "Error Code 1: Cuda Driver (uncorrectable ECC error encountered)",
    "cudaErrorIllegalAddress",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_ECC_UNCORRECTABLE: x",
    "(<cudaError_t.cudaErrorLaunchFailure: 719>,)",
    "Unable to determine the device handle: GPU is lost. Reboot the system to recover this GPU",
]
OUT_OF_MEMORY = [
    "cuMemAlloc failed: out of memory",
    "cuGraphInstantiateWithFlags failed: CUDA_ERROR_OUT_OF_MEMORY (2), out of memory",
    "IRuntime::deserializeCudaEngine: Error Code 2: OutOfMemory (Requested size was 263168 bytes.)",
    "CUDA failure 2: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
]
OTHERS = [
    "",
    "cuStreamEndCapture failed: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED (901), operation failed due to a previous error",
    "cuda runtime error 11: invalid argument",
    "indices element out of data bounds, idx=700 must be within the inclusive range [-5,4]",
    "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got invalid dimensions for input: x index: 0 Got: 719 Expected: 710",
    "an unknown error",
    "AssertionError",
]


@pytest.mark.parametrize("text", [*LOST, *OUT_OF_MEMORY, *OTHERS])
def test_messages_are_fatal_or_a_lack_of_memory_or_neither(text: str) -> None:
    assert bool(fatal_name(text)) == (text in LOST)
    assert is_out_of_memory(text) == (text in OUT_OF_MEMORY)


def test_cause_of_our_own_error_is_found() -> None:
    ours = RunnerError("m", given=Literally("RuntimeError"), expected="an answer", fix="See the log.")
    ours.__cause__ = RuntimeError(LOST[0])
    assert fatal(ours) == LOST[0]
    ours.__cause__ = RuntimeError(LOST[3])
    assert fatal(ours) == f"CUDA_ERROR_LAUNCH_FAILED: {LOST[3]}"


def test_quotes_of_a_client_are_ignored() -> None:
    assert fatal(InvalidRequest("text", given=LOST[0], expected="x", fix="y.")) is None


def test_circular_causes_end() -> None:
    one, two = ValueError("a"), ValueError("b")
    one.__cause__, two.__cause__ = two, one
    assert fatal(one) is None
