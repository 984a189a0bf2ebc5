"""The errors: one message shape, one exit code per kind, one status code per request error."""

from __future__ import annotations

import string
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from edge import errors
from edge.__main__ import cli
from edge.errors import FewheadsError, InvalidRequest, Raw, RequestError, RunnerError, Whole, printable
from edge.runtimes.cuda import fatal, fatal_name, is_out_of_memory
from edge.serving.statuses import STATUSES

#: Kinds that are not listed have the exit code of their base.
EXIT_CODES = {
    errors.FewheadsError: 1,
    errors.UsageError: 2,
    errors.BundleError: 3,
    errors.GoldenError: 4,
    errors.BackendError: 5,
    errors.ServerError: 6,
    errors.RequestError: 7,
    errors.ServerRefused: 7,  # a RequestError, seen from the client
    errors.DeviceFailed: 8,
    errors.RunStuck: 9,
    errors.DrainTimeout: 10,
}


def subclasses(base: type[FewheadsError]) -> Iterator[type[FewheadsError]]:
    """Return every subclass of the device; the workstation adds its own."""
    for found in base.__subclasses__():
        if found.__module__.startswith("edge."):
            yield found
        yield from subclasses(found)


ALL = [FewheadsError, *subclasses(FewheadsError)]


def test_every_kind_has_its_codes_its_place_in_the_overview_and_four_parts() -> None:
    explained = (cli.epilog or "").replace("\n", " ")
    for kind in ALL:
        assert kind.__module__ == "edge.errors"
        assert kind.exit_code == EXIT_CODES.get(kind, EXIT_CODES[RequestError])
        assert kind in EXIT_CODES or issubclass(kind, RequestError)
        assert (f"{kind.__name__} {kind.exit_code}" if kind in EXIT_CODES else kind.__name__) in (errors.__doc__ or "")
        error = kind("the subject", given=3, expected="4", fix="Do this.")
        assert str(error) == "the subject: got 3, expected 4. Do this."
        assert (error.subject, error.given, error.expected, error.fix) == ("the subject", 3, "4", "Do this.")
        assert f" {kind.exit_code} " in explained
    assert " 130 " in explained
    assert set(STATUSES) == set(subclasses(RequestError))
    assert len({status.grpc for status in STATUSES.values()}) == len(STATUSES)


def test_values_are_quoted_and_cut_and_descriptions_are_not_quoted() -> None:
    for value, text in (
        ("x", "'x'"),
        (Raw("x"), "x"),
        (Raw(OSError("no such thing")), "no such thing"),
        (b"\xff", "b'\\xff'"),
        (Raw("x" * 160), "x" * 160),
        (Raw("x" * 161), "x" * 160 + "… (161 characters)"),
        ("x" * 10**6, f"'{'x' * 159}… (1000000 characters)"),
        (b"x" * 10**6, f"b'{'x' * 158}… (1000000 characters)"),
        (Whole("y" * 10**4), "y" * 10**4),
    ):
        error = FewheadsError("the subject", given=value, expected="4", fix="Do this.")
        assert str(error) == f"the subject: got {text}, expected 4. Do this."
    assert str(FewheadsError("the subject", expected="4", fix="Do this.")) == "the subject: expected 4. Do this."
    # Text of unknown origin becomes safe for a terminal, and can be encoded.
    assert printable("\udcff") == "\\udcff"
    assert printable("a\x1b[2J\nb\u202ec\x9b\x7fé") == "a\\x1b[2J\\nb\\u202ec\\x9b\\x7fé"


def test_every_part_is_bounded_and_safe() -> None:
    name = "\N{GRINNING FACE}" * 10**6
    error = FewheadsError(f"model {name!r}", given=name, expected="4", fix="Do this.")
    half = "\N{GRINNING FACE}" * 119
    assert error.subject == f"model '{half[6:]}…{half}' (1000008 characters)"
    assert len(quote(str(error), safe=string.printable)) < 8 * 1024  # as grpc-message, with which metadata must fit
    for part in ("subject", "given", "expected", "fix"):
        parts = {"subject": "a", "given": "b", "expected": "c", "fix": "d", part: Raw("x" * 10**6)}
        assert 100 < len(str(FewheadsError(parts.pop("subject"), **parts))) < 1100  # type: ignore[arg-type]
        parts = {"subject": "a", "given": "b", "expected": "c", "fix": "d", part: Raw("\x1b[2J\udcff\n")}
        text = str(FewheadsError(parts.pop("subject"), **parts))  # type: ignore[arg-type]
        assert "\\x1b[2J\\udcff\n" in text
        assert text.encode()


LOST = [
    "cuGraphLaunch failed: CUDA_ERROR_ILLEGAL_ADDRESS (700), an illegal memory access was encountered",
    "cuStreamSynchronize failed: unspecified launch failure",
    "cuCtxSynchronize failed: unknown error",
    "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=jetson",
    "CUDA error code=710",
    "Cuda failure: 716",
    "[checkMacros.cpp::catchCudaError::203] Error Code 1: Cuda Runtime (misaligned address)",
    "CUDA_ERROR_LAUNCH_FAILED",
    "(<cudaError_t.cudaErrorLaunchFailure: 719>,)",
    "Unable to determine the device handle: GPU is lost. Reboot the system to recover this GPU",
]
OUT_OF_MEMORY = [
    "cuGraphInstantiateWithFlags failed: CUDA_ERROR_OUT_OF_MEMORY (2), out of memory",
    "IRuntime::deserializeCudaEngine: Error Code 2: OutOfMemory (Requested size was 263168 bytes.)",
    "CUDA_ERROR_OUT_OF_MEMORY",
]
OTHERS = [
    "",
    "cuStreamEndCapture failed: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED (901), operation failed due to a previous error",
    "cuda runtime error 11: invalid argument",
    "indices element out of data bounds, idx=700 must be within the inclusive range [-5,4]",
    "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got invalid dimensions for input: x index: 0 Got: 719 Expected: 710",
    "an unknown error",
]


@pytest.mark.parametrize("text", [*LOST, *OUT_OF_MEMORY, *OTHERS])
def test_messages_are_fatal_or_a_lack_of_memory_or_neither(text: str) -> None:
    assert bool(fatal_name(text)) == (text in LOST)
    assert is_out_of_memory(text) == (text in OUT_OF_MEMORY)


def test_fatal_errors_are_found_in_causes_and_not_in_quotes_or_circles() -> None:
    ours = RunnerError("m", given=Raw("RuntimeError"), expected="an answer", fix="See the log.")
    ours.__cause__ = RuntimeError(LOST[0])
    assert fatal(ours) == LOST[0]
    ours.__cause__ = RuntimeError(LOST[1])
    assert fatal(ours) == f"CUDA_ERROR_LAUNCH_FAILED: {LOST[1]}"
    assert fatal(InvalidRequest("text", given=LOST[0], expected="x", fix="y.")) is None  # a client's words
    one, two = ValueError("a"), ValueError("b")
    one.__cause__, two.__cause__ = two, one
    assert fatal(one) is None
