"""The errors: one message shape, one exit code per kind, one status code per refusal."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge import errors
from edge.__main__ import cli
from edge.errors import FewheadsError, Literally, RequestError, Whole, printable, shown
from edge.rpc.methods import STATUS_CODES

#: The base alone means "failed"; the kinds of request error share one code, because a command reports them alike.
EXIT_CODES = {
    errors.FewheadsError: 1,
    errors.UsageError: 2,
    errors.BundleError: 3,
    errors.GoldenError: 4,
    errors.BackendError: 5,
    errors.ServerError: 6,
    errors.RequestError: 7,
    errors.DeviceFailed: 8,
    errors.RunStuck: 9,
    errors.DrainTimeout: 10,
}


def subclasses(base: type[FewheadsError]) -> Iterator[type[FewheadsError]]:
    """Every subclass that the device has; the workstation adds its own."""
    for found in base.__subclasses__():
        if found.__module__.startswith("edge."):
            yield found
        yield from subclasses(found)


ALL = [FewheadsError, *subclasses(FewheadsError)]


def make(kind: type[FewheadsError] = FewheadsError, value: object = 3, expected: str = "4") -> FewheadsError:
    return kind("the subject", given=value, expected=expected, fix="Do this.")


@pytest.mark.parametrize("kind", ALL)
def test_exit_codes(kind: type[FewheadsError]) -> None:
    if kind is errors.ServerRefused:  # what the server calls a RequestError, seen from the client
        assert kind.exit_code == EXIT_CODES[RequestError]
    elif issubclass(kind, RequestError):
        assert kind.exit_code == EXIT_CODES[RequestError]
        assert kind is RequestError or "exit_code" not in vars(kind)
    else:
        assert kind.exit_code == EXIT_CODES[kind]
        assert "exit_code" in vars(kind)


def test_no_two_kinds_share_an_exit_code() -> None:
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    assert 130 not in EXIT_CODES.values()


def test_help_explains_every_exit_code() -> None:
    explained = (cli.epilog or "").replace("\n", " ")
    for code in {0, 130, *EXIT_CODES.values()}:
        assert f" {code} " in explained


def test_the_table_in_the_module_names_every_kind() -> None:
    for kind in ALL:
        assert f"- {kind.__name__}" in (errors.__doc__ or "")
        assert inspect.getdoc(kind)


def test_all_kinds_are_in_one_module() -> None:
    assert {kind.__module__ for kind in ALL} == {"edge.errors"}


@pytest.mark.parametrize("kind", list(subclasses(RequestError)))
def test_every_refusal_has_a_status_code(kind: type[RequestError]) -> None:
    assert kind in STATUS_CODES


def test_every_refusal_has_its_own_status_code() -> None:
    assert len(set(STATUS_CODES.values())) == len(STATUS_CODES)
    assert set(STATUS_CODES) == set(subclasses(RequestError))


@pytest.mark.parametrize("kind", ALL)
def test_a_message_has_four_parts(kind: type[FewheadsError]) -> None:
    error = make(kind)
    assert str(error) == "the subject: got 3, expected 4. Do this."
    assert (error.subject, error.given, error.expected, error.fix) == ("the subject", 3, "4", "Do this.")


def test_values_are_quoted_and_descriptions_are_not() -> None:
    assert "got 'x', expected" in str(make(value="x"))
    assert "got x, expected" in str(make(value=Literally("x")))
    assert "got None, expected" in str(make(value=None))
    assert "got b'\\xff', expected" in str(make(value=b"\xff"))


def test_an_exception_can_be_described() -> None:
    assert "got no such thing, expected" in str(make(value=Literally(OSError("no such thing"))))


@pytest.mark.parametrize("value", ["x" * 10**6, Literally("x" * 10**6), b"x" * 10**6, list(range(10**5))])
def test_a_huge_value_is_cut(value: object) -> None:
    message = str(make(value=value))
    assert len(message) < 300
    assert f"… ({len(value) if isinstance(value, Literally) else len(repr(value))} characters)" in message
    assert message.endswith("expected 4. Do this.")


@given(st.text() | st.binary() | st.integers() | st.lists(st.text()))
@settings(deadline=None)
def test_what_is_shown_is_short_and_begins_as_the_value_does(value: object) -> None:
    text = shown(value)
    assert len(text) < 200
    assert text.startswith(repr(value)[:160])
    assert "\n" not in text  # a value cannot forge a line of a log


def test_text_of_unknown_origin_is_safe_for_a_terminal() -> None:
    assert printable("a\x1b[2J\nb\u202ec\x9b\x7fé") == "a\\x1b[2J\\nb\\u202ec\\x9b\\x7fé"
    assert "y" * 10**4 in str(make(value=Whole("y" * 10**4)))


def test_a_value_at_the_limit_is_whole() -> None:
    assert shown(Literally("x" * 160)) == "x" * 160
    assert shown(Literally("x" * 161)) == "x" * 160 + "… (161 characters)"


def test_the_parts_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        FewheadsError("subject", 3, "4", "Do this.")  # type: ignore[misc]


def test_raising_keeps_the_class() -> None:
    with pytest.raises(RequestError) as caught:
        raise make(errors.Overloaded)
    assert type(caught.value) is errors.Overloaded
    assert isinstance(caught.value, FewheadsError)
