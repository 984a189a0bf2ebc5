"""CUDA errors by their texts: those that leave a process without a device, and those for lack of memory.

After a fatal one every later call fails, and only a new process helps.

The numbers, names and texts are those of CUDA's ``cudaError_t`` and ``CUresult``. Errors after which a call can be
repeated, such as a lack of memory, are not among them.
"""

from __future__ import annotations

import re

from edge.errors import FewheadsError

#: Numbers, which the runtime's and the driver's API share, and the texts that CUDA gives for them.
_ERRORS: dict[int, str] = {
    214: "uncorrectable ECC error",
    220: "uncorrectable NVLink error",
    700: "an illegal memory access was encountered",
    702: "the launch timed out and was terminated",
    709: "context is destroyed",
    710: "device-side assert triggered",
    714: "hardware stack error",
    715: "an illegal instruction was encountered",
    716: "misaligned address",
    717: "operation not supported on global/shared address space",
    718: "invalid program counter",
    719: "unspecified launch failure",
    721: "the execution context was contained",
    999: "failed: unknown error",
}
_NAMES = (
    "ECC_?Uncorrectable",
    "NVLINK_?Uncorrectable",
    "Illegal_?Address",
    "Launch_?Timeout",
    "Context_?Is_?Destroyed",
    "Assert",
    "Hardware_?Stack_?Error",
    "Illegal_?Instruction",
    "Misaligned_?Address",
    "Invalid_?Address_?Space",
    "Invalid_?Pc",
    "Launch_?Fail(?:ure|ed)",
    "Contained",
    "Unknown",
)
#: Messages of the driver about a device that has gone from the bus.
_LOST = ("gpu is lost", "device is lost", "fallen off the bus")
_TEXT = re.compile("|".join(map(re.escape, (*_ERRORS.values(), *_LOST))), re.IGNORECASE)
_NAME = re.compile(rf"\b(?:cudaError|CUDA_ERROR_)(?:{'|'.join(_NAMES)})\b", re.IGNORECASE)
_NUMBER = re.compile(rf"\bcuda (?:runtime )?(?:failure|error)(?: code)?[ :=]+(?:{'|'.join(map(str, _ERRORS))})\b", re.I)


#: CUDA's, pycuda's and TensorRT's words for too little memory of the device.
_OUT_OF_MEMORY = re.compile(r"\bout ?of ?memory\b|OUT_OF_MEMORY|cudaErrorMemoryAllocation", re.IGNORECASE)


def is_out_of_memory(text: str) -> bool:
    """Return whether a message of CUDA, or of a runtime that quotes it, reports a lack of memory."""
    return bool(_OUT_OF_MEMORY.search(text))


def is_fatal(text: str) -> bool:
    """Return whether a message of CUDA, or of a runtime that quotes it, reports an error that no process outlives."""
    return any(pattern.search(text) for pattern in (_TEXT, _NAME, _NUMBER))


def fatal(error: BaseException) -> str | None:
    """Return the text of the fatal device error behind an exception, or None where there is none.

    Our own errors are not read, only what caused them: they quote what clients sent.
    """
    seen: BaseException | None = error
    for _ in range(16):  # chains are short, and might be rings
        if seen is None:
            return None
        if not isinstance(seen, FewheadsError) and is_fatal(f"{type(seen).__name__}: {seen}"):
            return f"{type(seen).__name__}: {seen}"
        seen = seen.__cause__ or seen.__context__
    return None
