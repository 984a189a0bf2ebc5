"""The errors: one message shape, one exit code per kind, one status code per request error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge import errors
from edge.__main__ import cli
from edge.errors import FewheadsError, Literally, RequestError, Whole, printable, shown
from edge.rpc.methods import STATUS_CODES

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


def message(value: object) -> str:
    return str(FewheadsError("the subject", given=value, expected="4", fix="Do this."))


def test_every_kind_has_its_exit_code_its_place_in_the_overview_and_four_parts() -> None:
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


def test_every_request_error_has_its_own_status_code() -> None:
    assert set(STATUS_CODES) == set(subclasses(RequestError))
    assert len(set(STATUS_CODES.values())) == len(STATUS_CODES)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "'x'"),
        (Literally("x"), "x"),
        (Literally(OSError("no such thing")), "no such thing"),
        (None, "None"),
        (b"\xff", "b'\\xff'"),
        (Literally("x" * 160), "x" * 160),
        (Literally("x" * 161), "x" * 160 + "… (161 characters)"),
        ("x" * 158, repr("x" * 158)),
        ("x" * 10**6, f"'{'x' * 159}… (1000002 characters)"),
        (Whole("y" * 10**4), "y" * 10**4),
    ],
)
def test_values_are_quoted_and_cut_and_descriptions_are_not_quoted(value: object, text: str) -> None:
    assert message(value) == f"the subject: got {text}, expected 4. Do this."


@given(st.text() | st.binary() | st.integers() | st.lists(st.text()))
@settings(deadline=None)
def test_any_value_is_shown_on_one_short_line(value: object) -> None:
    text = shown(value)
    assert len(text) < 200
    assert text.startswith(repr(value)[:160])
    assert "\n" not in text  # a value cannot forge a line of a log


def test_text_of_unknown_origin_is_safe_for_a_terminal() -> None:
    assert printable("a\x1b[2J\nb\u202ec\x9b\x7fé") == "a\\x1b[2J\\nb\\u202ec\\x9b\\x7fé"
