"""Parameters of a ModelInfer request: names, types and bounds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from edge.errors import InvalidRequest, Raw
from edge.programs.sampling import LONGEST_STOP, MOST_STOPS
from edge.protocol import LOGPROBS, STREAM_PARTIAL, THRESHOLD, TOP_K
from edge.scheduling.job import DEFAULT_PRIORITY, PRIORITY_LEVELS
from edge.serving.request import Values, check_name, parameter_kind

#: Also the parameters of the response that name the tier that answered, and the reason for its choice.
TIER, TIER_REASON = "tier", "tier_reason"
#: Parameters of a loop.
MAX_LOOPS, TOLERANCE = "max_loops", "tolerance"
#: The parameter of answers to questions, and its largest value.
N_BEST, _MOST_ANSWERS = "n_best", 100
_INTEGERS = ("int64_param", "uint64_param")
#: Parameters that the server reads, and the kinds of value that each accepts. Clients may add others.
_KINDS: dict[str, tuple[str, ...]] = {
    "timeout": _INTEGERS,
    "priority": _INTEGERS,
    "sequence_id": (*_INTEGERS, "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
    "triton_enable_empty_final_response": ("bool_param",),
    "binary_data_output": ("bool_param",),
    "timings": ("bool_param",),
    TIER: ("string_param",),
    "policy": ("string_param",),
    MAX_LOOPS: _INTEGERS,
    TOLERANCE: ("double_param", *_INTEGERS),
    STREAM_PARTIAL: ("bool_param",),
    "max_tokens": _INTEGERS,
    "min_tokens": _INTEGERS,
    "ignore_eos": ("bool_param",),
    "temperature": ("double_param", *_INTEGERS),
    TOP_K: _INTEGERS,
    "top_p": ("double_param", *_INTEGERS),
    "seed": _INTEGERS,
    "stop": ("string_param",),
    LOGPROBS: ("bool_param",),
    "head": ("string_param",),
    "alpha": ("double_param", *_INTEGERS),
    N_BEST: _INTEGERS,
    THRESHOLD: ("double_param", *_INTEGERS),
}
#: Those of generated text, one of which boxes have, too, and those that are numbers with a fraction.
_TEXT = ("max_tokens", "min_tokens", "ignore_eos", "temperature", TOP_K, "top_p", "seed", "stop", LOGPROBS)
_FLOATS = {TOLERANCE, "temperature", "top_p", "alpha", THRESHOLD}
_OURS: tuple[str, ...] = tuple(name for name in _KINDS if not name.startswith("triton_"))
#: Names from other servers and from our own command line.
_ALIASES = {"deadline": "timeout", "deadline_ms": "timeout"}
_FIXES = {"timeout": "Correct or rename it; timeout is in microseconds."}
#: The share of characters that two names have in common if one is a misspelling of the other.
_LIKENESS = 0.8
#: In a JSON list of the longest stop texts, a character may take 12, and 4 separate two texts.
_MOST_STOP_CHARS = MOST_STOPS * (12 * LONGEST_STOP + 4)
#: The time of a comparison grows with the length.
_MAX_COMPARED_LENGTH = 32


class Parameters(NamedTuple):
    """The values that a request sets; those that it does not set are None or the default."""

    timeout_seconds: float | None = None
    timings: bool = False
    tier: str | None = None
    policy: str | None = None
    priority: int = DEFAULT_PRIORITY
    stream_partial: bool = False
    loop: Mapping[str, Any] = MappingProxyType({})  # the limits of a loop
    text: Mapping[str, Any] = MappingProxyType({})  # fields of :class:`edge.programs.sampling.Sampling`
    head: str = ""  # another model, as NAME or NAME:VERSION, and how much it moves the logits
    alpha: float | None = None
    n_best: int | None = None  # answers to a question
    threshold: float | None = None  # of the scores of boxes


def parse(given: Values) -> Parameters:
    """Return a request's parameters; none may be misspelt, mistyped, out of range, reserved or of a sequence."""
    if not given:
        return Parameters()
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in _KINDS:
            _check_unknown(name)
            continue
        kind = parameter_kind(value)
        if kind not in _KINDS[name]:
            expected = " or ".join(_KINDS[name])
            raise InvalidRequest(f"parameter {name!r}", given=kind, expected=expected, fix="Send it with that type.")
        values[name] = value
    for name in ("timeout", "priority"):
        if values.get(name, 0) < 0:
            subject, expected = f"parameter {name!r}", "0 or more"
            raise InvalidRequest(subject, given=values[name], expected=expected, fix="0 is the default.")
    for name in ("sequence_id", "sequence_start", "sequence_end"):
        if values.get(name):
            expected, fix = "none: no model keeps state", "Leave the sequence parameters out."
            raise InvalidRequest(f"parameter {name!r}", given=values[name], expected=expected, fix=fix)
    priority = values.get("priority") or DEFAULT_PRIORITY
    if priority > PRIORITY_LEVELS:
        expected = f"1, the highest, to {PRIORITY_LEVELS}, or 0"
        raise InvalidRequest("parameter 'priority'", given=priority, expected=expected, fix="0 is the default.")
    if not 1 <= values.get(N_BEST, 1) <= _MOST_ANSWERS:
        subject, expected = f"parameter {N_BEST!r}", f"1 to {_MOST_ANSWERS}"
        raise InvalidRequest(subject, given=values[N_BEST], expected=expected, fix="1 is the default.")
    if not 0 <= values.get(THRESHOLD, 0) <= 1:
        subject = f"parameter {THRESHOLD!r}"
        raise InvalidRequest(subject, given=values[THRESHOLD], expected="0 to 1", fix="The model has a default.")
    if "alpha" in values and not values.get("head"):
        fix = "Name a head, or leave it out."
        raise InvalidRequest("parameter 'alpha'", given=values["alpha"], expected="a 'head' beside it", fix=fix)
    check_name("parameter 'head'", values.get("head", ""))
    timeout_us = values.get("timeout")
    for name in _FLOATS & values.keys():
        values[name] = float(values[name])
    if "stop" in values:
        values["stop"] = _stops(values["stop"])
    return Parameters(
        timeout_seconds=timeout_us / 1e6 if timeout_us else None,
        timings=values.get("timings", False),
        tier=values.get(TIER),
        policy=values.get("policy"),
        priority=priority,
        stream_partial=values.get(STREAM_PARTIAL, False),
        loop={name: values[name] for name in (MAX_LOOPS, TOLERANCE) if name in values},
        text={name: values[name] for name in _TEXT if name in values},
        head=values.get("head", ""),
        alpha=values.get("alpha"),
        n_best=values.get(N_BEST),
        threshold=values.get(THRESHOLD),
    )


def with_logprobs(
    names: list[str], text: Mapping[str, Any], by_token: Collection[str]
) -> tuple[list[str], Mapping[str, Any]]:
    """Return the outputs to send, and the parameters of generated text.

    The parameter ``logprobs`` adds the outputs ``by_token``, and the name of one of them sets it.
    """
    if text.get(LOGPROBS):
        return [*names, *(name for name in by_token if name not in names)], text
    if any(name in by_token for name in names):
        return names, {**text, LOGPROBS: True}
    return names, text


def _stops(given: str) -> tuple[str, ...]:
    """Return the stop texts in a JSON list of texts; any other string is the only one."""
    if len(given) > _MOST_STOP_CHARS:
        text, expected = Raw(f"{len(given)} characters"), f"{MOST_STOPS} texts of up to {LONGEST_STOP} characters"
        raise InvalidRequest("parameter 'stop'", given=text, expected=expected, fix="Give fewer or shorter texts.")
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(given, type=tuple[str, ...])
    return (given,)


def _check_unknown(name: str) -> None:
    check_name("parameter name", name)
    if name.startswith("triton_"):
        fix = "Names that start with triton_ are the protocol's; choose another one."
        raise InvalidRequest("parameter name", given=name, expected="a known one", fix=fix)
    known = _similar(name) if len(name) <= _MAX_COMPARED_LENGTH else None
    if known:
        expected = f"{known!r}, or a name that is not like any of {', '.join(_OURS)}"
        fix = _FIXES.get(known, "Correct or rename it.")
        raise InvalidRequest("parameter name", given=name, expected=expected, fix=fix)


@lru_cache
def _similar(name: str) -> str | None:
    """Return the parameter that a name probably misspells; None for a client's own, which it sends every time."""
    plain = name.lower().replace("-", "_")
    if plain in _ALIASES:
        return _ALIASES[plain]
    for ours in _OURS:
        if sorted(plain) == sorted(ours) or plain.startswith(f"{ours}_"):
            return ours
    close = get_close_matches(plain, _OURS, 1, _LIKENESS)
    return close[0] if close else None
