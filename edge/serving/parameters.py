"""The parameters of a ModelInfer request: those with a meaning, their types and their bounds."""

from __future__ import annotations

from difflib import get_close_matches
from typing import NamedTuple

from edge.errors import InvalidRequest, Literally
from edge.pb import inference_pb2 as pb
from edge.scheduling.job import DEFAULT_PRIORITY, PRIORITY_LEVELS

_TIMINGS = "timings"
#: Also names the parameter of the response that says which tier answered.
TIER = "tier"
#: The parameter of the response that says why it was that tier.
TIER_REASON = "tier_reason"
_POLICY = "policy"
#: Request parameters with a meaning, and the kinds of value that each may have. Others are the client's own business.
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "timeout": ("int64_param", "uint64_param"),
    "priority": ("int64_param", "uint64_param"),
    "sequence_id": ("int64_param", "uint64_param", "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
    "triton_enable_empty_final_response": ("bool_param",),
    "binary_data_output": ("bool_param",),
    _TIMINGS: ("bool_param",),
    TIER: ("string_param",),
    _POLICY: ("string_param",),
}

_OURS: tuple[str, ...] = tuple(name for name in _PARAMETERS if not name.startswith("triton_"))
#: Names that clients of other servers, or of our own command line, might try.
_ALIASES = {"deadline": "timeout", "deadline_ms": "timeout"}
#: What a name that is corrected needs beside.
_UNITS = {"timeout": "Correct or rename it; timeout is in microseconds."}
#: Of the characters of two names, how many have to agree for one to be taken for a misspelling of the other.
_LIKENESS = 0.8
_LONGEST = 32


class Parameters(NamedTuple):
    """What a request's parameters ask for; None and False where they do not."""

    timeout_seconds: float | None = None
    timings: bool = False
    tier: str | None = None
    policy: str | None = None
    priority: int = DEFAULT_PRIORITY


def _meant(name: str) -> str | None:
    """Return the parameter of ours that a name is likely to mean; None for a client's own business."""
    if len(name) > _LONGEST:  # comparing takes time, which grows with the length
        return None
    plain = name.lower().replace("-", "_")
    if plain in _ALIASES:
        return _ALIASES[plain]
    for ours in _OURS:
        transposed = len(plain) > 2 and sorted(plain) == sorted(ours)
        if plain == ours or transposed or plain.startswith(f"{ours}_"):
            return ours
    close = get_close_matches(plain, _OURS, 1, _LIKENESS)
    return close[0] if close else None


def parse(request: pb.ModelInferRequest) -> Parameters:
    """Check a request's parameters and return those that matter.

    Raises:
        InvalidRequest: one is misspelt, of the wrong type, out of range or reserved, or it asks for state that no
            model keeps.
    """
    if not request.parameters:
        return Parameters()
    values: dict[str, object] = {}
    for name, parameter in request.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        allowed = _PARAMETERS.get(name)
        subject = f"parameter {name!r}"
        if allowed is None:
            if name.startswith("triton_"):
                fix = "Names that start with triton_ are the protocol's; choose another one."
                raise InvalidRequest(subject, given="a reserved name", expected="a known one", fix=fix)
            meant = _meant(name)
            if meant:
                expected = f"{meant!r}, or a name that is not like any of {', '.join(_OURS)}"
                fix = _UNITS.get(meant, "Correct or rename it.")
                raise InvalidRequest("parameter name", given=name, expected=expected, fix=fix)
            continue
        if kind not in allowed:
            fix = "Send it with that type."
            raise InvalidRequest(subject, given=kind, expected=" or ".join(allowed), fix=fix)
        values[name] = getattr(parameter, kind)
    for name in ("timeout", "priority"):
        value = values.get(name, 0)
        if not isinstance(value, int) or value < 0:
            raise InvalidRequest(f"parameter {name!r}", given=value, expected="0 or more", fix="0 is the default.")
    if values.get("sequence_id") or values.get("sequence_start") or values.get("sequence_end"):
        given = Literally("a request of a sequence")
        fix = "Leave the sequence parameters out."
        raise InvalidRequest("parameter 'sequence_id'", given=given, expected="none: no model keeps state", fix=fix)
    priority = values.get("priority") or DEFAULT_PRIORITY
    if not isinstance(priority, int) or priority > PRIORITY_LEVELS:
        expected = f"1, the highest, to {PRIORITY_LEVELS}, or 0"
        raise InvalidRequest("parameter 'priority'", given=priority, expected=expected, fix="0 is the default.")
    timeout_us, tier, policy = values.get("timeout"), values.get(TIER), values.get(_POLICY)
    return Parameters(
        timeout_seconds=timeout_us / 1e6 if isinstance(timeout_us, int) and timeout_us else None,
        timings=bool(values.get(_TIMINGS)),
        tier=tier if isinstance(tier, str) else None,
        policy=policy if isinstance(policy, str) else None,
        priority=priority,
    )
