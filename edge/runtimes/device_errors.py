"""CUDA errors, recognized by their texts: fatal ones, and a lack of memory.

After a fatal error every later CUDA call fails, and only a new process helps. The numbers, names and texts are those
of CUDA's ``cudaError_t`` and ``CUresult``. Errors after which a call can be repeated are not fatal.
"""

from __future__ import annotations

import re

from edge.errors import FewheadsError

#: Number and name in the driver's API, and text. The runtime's API shares the numbers and, in camel case, the names.
_FATAL: tuple[tuple[int, str, str], ...] = (
    (214, "ECC_UNCORRECTABLE", "uncorrectable ECC error"),
    (220, "NVLINK_UNCORRECTABLE", "uncorrectable NVLink error"),
    (700, "ILLEGAL_ADDRESS", "an illegal memory access was encountered"),
    (702, "LAUNCH_TIMEOUT", "the launch timed out and was terminated"),
    (709, "CONTEXT_IS_DESTROYED", "context is destroyed"),
    (710, "ASSERT", "device-side assert triggered"),
    (714, "HARDWARE_STACK_ERROR", "hardware stack error"),
    (715, "ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"),
    (716, "MISALIGNED_ADDRESS", "misaligned address"),
    (717, "INVALID_ADDRESS_SPACE", "operation not supported on global/shared address space"),
    (718, "INVALID_PC", "invalid program counter"),
    (719, "LAUNCH_FAILED", "unspecified launch failure"),
    (721, "CONTAINED", "the execution context was contained"),
    (999, "UNKNOWN", "failed: unknown error"),
)
#: Messages of the driver about a device that is no longer on the bus.
_LOST = "gpu is lost|device is lost|fallen off the bus"


def _pattern(number: int, name: str, text: str) -> re.Pattern[str]:
    # The runtime's API has cudaErrorLaunchFailure where the driver's has CUDA_ERROR_LAUNCH_FAILED.
    names = name.replace("_", "_?").replace("FAILED", "FAIL(?:ED|URE)")
    return re.compile(
        rf"{re.escape(text)}|\b(?:cudaError|CUDA_ERROR_)(?:{names})\b"
        rf"|\bcuda (?:runtime )?(?:failure|error)(?: code)?[ :=]+{number}\b",
        re.IGNORECASE,
    )


_PATTERNS = {
    **{f"CUDA_ERROR_{name}": _pattern(number, name, text) for number, name, text in _FATAL},
    "device lost": re.compile(_LOST, re.IGNORECASE),
}
#: CUDA's, pycuda's and TensorRT's terms for too little device memory.
_OUT_OF_MEMORY = re.compile(r"\bout ?of ?memory\b|OUT_OF_MEMORY|cudaErrorMemoryAllocation", re.IGNORECASE)


def is_out_of_memory(text: str) -> bool:
    """Return whether a message of CUDA, or of a runtime that quotes it, reports a lack of memory."""
    return bool(_OUT_OF_MEMORY.search(text))


def fatal_name(text: str) -> str | None:
    """Return the name of the fatal error in a message of CUDA, or of a runtime that quotes it; None if it is not fatal.

    The name is the driver's, such as ``CUDA_ERROR_LAUNCH_FAILED``, or ``device lost``.
    """
    return next((name for name, pattern in _PATTERNS.items() if pattern.search(text)), None)


def fatal(error: BaseException) -> str | None:
    """Return the name and text of the fatal device error that caused an exception, or None.

    The texts of our own errors do not count, because they quote what clients sent; their causes do.
    """
    seen: BaseException | None = error
    for _ in range(16):  # chains are short, but may be circular
        if seen is None:
            return None
        name = None if isinstance(seen, FewheadsError) else fatal_name(f"{type(seen).__name__}: {seen}")
        if name:
            return str(seen) if name in str(seen) else f"{name}: {seen}"
        seen = seen.__cause__ or seen.__context__
    return None
