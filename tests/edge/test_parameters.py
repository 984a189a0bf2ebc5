"""Parameters of ModelInfer: their values, their bounds, and names that misspell them."""

from __future__ import annotations

from typing import Any

import pytest

from edge.errors import InvalidRequest
from edge.pb import inference_pb2 as pb
from edge.serving.parameters import Parameters, _similar, parse


def request(**parameters: dict[str, Any]) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(parameters={name: pb.InferParameter(**value) for name, value in parameters.items()})


def test_values() -> None:
    named = {"tier": {"string_param": "lean"}, "policy": {"string_param": "load"}}
    for parameters, expected in (
        ({}, Parameters(None, False, None, None, 5)),
        ({"timeout": {"int64_param": 0}, "priority": {"uint64_param": 0}}, Parameters()),
        ({"timeout": {"uint64_param": 2_500_001}}, Parameters(timeout_seconds=2.500001)),
        ({"priority": {"int64_param": 1}, "timings": {"bool_param": True}}, Parameters(timings=True, priority=1)),
        ({"priority": {"uint64_param": 10}, "timings": {"bool_param": False}}, Parameters(priority=10)),
        (named, Parameters(tier="lean", policy="load")),
        ({"sequence_id": {"string_param": ""}, "sequence_end": {"bool_param": False}}, Parameters()),
        ({"time": {"uint64_param": 1}, "mine": {}, "id": {}, "timeout" + "_" * 26: {}}, Parameters()),  # 33 characters
    ):
        assert parse(request(**parameters)) == expected


def test_own_names_are_compared_once() -> None:
    misses = _similar.cache_info().misses
    for _ in range(3):
        parse(request(**{f"own-name-{number}": {"bool_param": True} for number in range(64)}))
    assert _similar.cache_info().misses - misses == 64


def test_errors() -> None:
    for name, value, message in (
        ("timeout", {"string_param": "1"}, "'timeout': got 'string_param', expected int64_param or uint64_param"),
        ("timeout", {"int64_param": -1}, "parameter 'timeout': got -1, expected 0 or more. 0 is the default."),
        ("priority", {"int64_param": 11}, "parameter 'priority': got 11, expected 1, the highest, to 10, or 0."),
        ("priority", {}, "parameter 'priority': got None, expected int64_param or uint64_param"),
        *((f"sequence_{part}", {"bool_param": True}, f"'sequence_{part}': got True") for part in ("start", "end")),
        ("sequence_id", {"uint64_param": 7}, "'sequence_id': got 7, expected none: no model keeps state"),
        ("sequence_id", {"string_param": "7"}, "Leave the sequence parameters out."),
        ("triton_zz", {}, "parameter name: got 'triton_zz', expected a known one"),
        ("teir", {}, "parameter name: got 'teir', expected 'tier', or a name that is not like any of timeout, "),
        ("Policy", {}, "got 'Policy', expected 'policy'"),
        ("timings_ms", {}, "expected 'timings', or a name that is not like any of timeout, priority, sequence_id, "),
        ("deadline", {}, "expected 'timeout', or a name"),
        ("Deadline-MS", {}, "Correct or rename it; timeout is in microseconds."),
        ("timeout_" + "x" * 24, {}, "expected 'timeout'"),  # 32 characters
    ):
        with pytest.raises(InvalidRequest) as caught:
            parse(request(**{name: value}))
        assert message in str(caught.value)
