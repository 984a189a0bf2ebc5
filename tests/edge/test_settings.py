"""The server's settings: each declared once and checked, all that is wrong reported at once, with the way out."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from pathlib import Path
from typing import Any

import ngh2
import pytest

from edge.cli.serve import serve
from edge.errors import UsageError
from edge.settings import DECLARATIONS, NGH2_VERSION, Settings, choose_transport, option_of

ROOT = Path(__file__).parent.parent.parent


def refused(repository: Path, **wrong: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        Settings(repository=repository, **wrong)
    assert caught.value.fix.endswith(".")
    return caught.value


def test_defaults(tmp_path: Path) -> None:
    settings = Settings(repository=tmp_path)
    assert settings.host == "127.0.0.1"  # nothing listens on the network unless it is told to
    assert (settings.grpc_port, settings.metrics_port) == (8001, 8002)
    assert (settings.target, settings.cache, settings.strict_readiness) == ("auto", None, True)


@pytest.mark.parametrize(
    "good",
    [
        {"grpc_port": 0, "metrics_port": 0},
        {"grpc_port": 65535, "metrics_port": None},
        {"grpc_port": 8002, "metrics_port": None},
        {"max_message_bytes": 1, "max_queue_size": 1},
        {"max_message_bytes": 2**31 - 1},
        {"max_queue_bytes": 1, "instances": 1, "max_queue_delay_us": 0, "default_timeout_ms": 0},
        {"max_queue_bytes": 2**40, "instances": 64, "max_queue_delay_us": 1_000_000, "default_timeout_ms": math.inf},
        *({"policy": policy} for policy in (None, "pinned", "router", "deadline", "load")),
        {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
        {"http_port": 8000},
        {"drain_seconds": 0},
        {"drain_seconds": math.inf},
        {"model_control": "poll", "poll_seconds": 0.1},
        {"watchdog_seconds": 0.1, "stuck_exit_seconds": 0, "memory_headroom_bytes": 0},
        {"watchdog_seconds": math.inf, "stuck_exit_seconds": math.inf, "memory_headroom_bytes": 2**40},
        {"model_control": "explicit", "load_models": ("*",)},
        {"model_control": "explicit", "load_models": ("a", "b")},
        {"allow_shared_memory": True, "max_shared_memory_bytes": 1},
        {"log_level": "debug"},
        {"transport": "grpcio"},
        {"transport": "nghttp2"},
    ],
)
def test_the_limits_themselves_are_good(tmp_path: Path, good: dict[str, Any]) -> None:
    settings = Settings(repository=tmp_path, **good)
    assert {name: getattr(settings, name) for name in good} == good


def test_a_repository_that_is_not_there(tmp_path: Path) -> None:
    error = refused(tmp_path / "none")
    assert str(error).startswith(f"REPOSITORY: got {tmp_path / 'none'}, which is not there, expected a directory")


def test_a_repository_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "which is a file" in str(refused(tmp_path / "file"))


@pytest.mark.parametrize("port", [-1, 65536, 10**20])
@pytest.mark.parametrize("field", ["grpc_port", "metrics_port", "http_port"])
def test_no_such_port(tmp_path: Path, field: str, port: int) -> None:
    error = refused(tmp_path, **{field: port})
    assert error.subject == f"--{field.replace('_', '-')}"
    assert error.expected == "0 to 65535"


def test_one_port_for_two(tmp_path: Path) -> None:
    error = refused(tmp_path, grpc_port=9000, metrics_port=9000)
    assert (error.subject, error.given) == ("--metrics-port", 9000)


@pytest.mark.parametrize("port", [8001, 8002])
def test_one_port_for_two_with_http(tmp_path: Path, port: int) -> None:
    assert refused(tmp_path, http_port=port).subject == "--http-port"


@pytest.mark.parametrize("size", [0, -1, 2**31, 10**30])
@pytest.mark.parametrize("field", ["max_message_bytes", "max_queue_size"])
def test_no_such_size(tmp_path: Path, field: str, size: int) -> None:
    error = refused(tmp_path, **{field: size})
    assert error.subject == f"--{field.replace('_', '-')}"
    assert error.given == size


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_queue_bytes", 0),
        ("instances", 0),
        ("instances", 65),
        ("max_queue_delay_us", -1),
        ("max_queue_delay_us", 1_000_001),
        ("default_timeout_ms", -1.0),
        ("default_timeout_ms", math.nan),
        ("policy", "fast"),
        ("watchdog_seconds", 0.0),
        ("watchdog_seconds", math.nan),
        ("stuck_exit_seconds", -1.0),
        ("memory_headroom_bytes", -1),
    ],
)
def test_no_such_scheduling(tmp_path: Path, field: str, value: object) -> None:
    error = refused(tmp_path, **{field: value})
    assert error.subject == f"--{field.replace('_', '-')}"
    assert str(error.given) == str(value)


@pytest.mark.parametrize("seconds", [-0.1, -math.inf, math.nan])
def test_no_such_time(tmp_path: Path, seconds: float) -> None:
    assert refused(tmp_path, drain_seconds=seconds).subject == "--drain-seconds"


@pytest.mark.parametrize("seconds", [0.09, 0, -1, math.inf, math.nan])
def test_no_such_pause(tmp_path: Path, seconds: float) -> None:
    assert refused(tmp_path, poll_seconds=seconds).subject == "--poll-seconds"


@pytest.mark.parametrize(("field", "word"), [("model_control", "POLL"), ("log_level", "trace")])
def test_no_such_word(tmp_path: Path, field: str, word: str) -> None:
    error = refused(tmp_path, **{field: word})
    assert (error.subject, error.given) == (f"--{field.replace('_', '-')}", word)


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_models_to_load_where_all_are_loaded(tmp_path: Path, mode: str) -> None:
    error = refused(tmp_path, model_control=mode, load_models=("a",))
    assert (error.subject, error.expected) == ("--load-model", "--model-control explicit")


def test_all_models_and_one_of_them(tmp_path: Path) -> None:
    assert refused(tmp_path, model_control="explicit", load_models=("*", "a")).expected == "* alone, or names"


def test_no_room_for_shared_memory(tmp_path: Path) -> None:
    assert refused(tmp_path, max_shared_memory_bytes=0).subject == "--max-shared-memory-bytes"


@pytest.mark.parametrize(
    ("given", "doors"),
    [
        ({}, []),
        ({"host": "localhost"}, []),
        ({"host": "::1"}, []),
        ({"host": "0.0.0.0"}, ["whoever reaches it may call everything", "requests and answers can be read"]),
        ({"host": "nano.local"}, ["whoever reaches it may call everything", "requests and answers can be read"]),
        ({"host": "::", "tokens": Path("t")}, ["requests, answers and tokens can be read"]),
        ({"host": "10.0.0.1", "tls_certificate": Path("c"), "tls_key": Path("k")}, ["may call everything"]),
        ({"host": "10.0.0.1", "tls_certificate": Path("c"), "tls_key": Path("k"), "tokens": Path("t")}, []),
        ({"host": "10.0.0.1", "tls_certificate": Path("c"), "tls_key": Path("k"), "tls_client_ca": Path("a")}, []),
    ],
)
def test_what_a_stranger_may_do(tmp_path: Path, given: dict[str, Any], doors: list[str]) -> None:
    told = Settings(repository=tmp_path, **given).exposure_warnings()
    assert len(told) == len(doors)
    assert all(door in text for door, text in zip(doors, told, strict=True))


@pytest.mark.parametrize("half", ["tls_certificate", "tls_key"])
def test_half_of_a_certificate(tmp_path: Path, half: str) -> None:
    assert refused(tmp_path, **{half: tmp_path}).expected == "both or none"


def test_an_authority_of_clients_without_a_certificate(tmp_path: Path) -> None:
    assert refused(tmp_path, tls_client_ca=tmp_path).subject == "--tls-client-ca"


def test_what_is_off_unless_it_is_asked_for(tmp_path: Path) -> None:
    settings = Settings(repository=tmp_path)
    assert (settings.model_control, settings.load_models, settings.allow_shared_memory) == ("none", (), False)


def test_settings_do_not_change(tmp_path: Path) -> None:
    settings = Settings(repository=tmp_path)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.grpc_port = 1  # type: ignore[misc]


def test_every_setting_has_help_and_every_option_is_a_setting() -> None:
    names = [field.name for field in dataclasses.fields(Settings)]
    assert list(DECLARATIONS) == names
    assert all(re.fullmatch(r"[A-Z].*\.", DECLARATIONS[name].help) for name in names)
    options = {parameter.name: parameter.opts[0] for parameter in serve.params}
    # These two give no setting of their own.
    assert (options.pop("no_metrics"), options.pop("as_json")) == ("--no-metrics", "--json")
    assert options.pop("repository") == "repository"
    assert options == {name: option_of(name) for name in names[1:]}


def test_the_command_line_and_programs_have_the_same_defaults(tmp_path: Path) -> None:
    given = serve.make_context("serve", [str(tmp_path)]).params
    assert (given.pop("no_metrics"), given.pop("as_json")) == (False, False)
    settings = Settings(repository=tmp_path)
    assert given == {name: getattr(settings, name) for name in DECLARATIONS}


def test_every_default_is_within_its_bounds() -> None:
    for field in dataclasses.fields(Settings):
        if field.default not in (None, dataclasses.MISSING):
            assert DECLARATIONS[field.name].problem(field.name, field.default) is None


def test_the_command_line_gives_every_kind_of_value(tmp_path: Path) -> None:
    arguments = [str(tmp_path), "--grpc-port=1", "--drain-seconds=0.5", "--no-batching", "--allow-shared-memory"]
    arguments += ["--load-model=a", "--load-model=b", "--tokens=t", "--rate-limit=5:7", "--policy=router"]
    given = serve.make_context("serve", arguments).params
    assert (given["grpc_port"], given["drain_seconds"], given["batching"]) == (1, 0.5, False)
    assert (given["allow_shared_memory"], given["load_models"], given["tokens"]) == (True, ("a", "b"), Path("t"))
    assert (given["rate_limit"].per_second, given["rate_limit"].burst, given["policy"]) == (5, 7, "router")


def test_all_that_is_wrong_is_reported_at_once(tmp_path: Path) -> None:
    error = refused(
        tmp_path / "none", grpc_port=-1, drain_seconds=math.nan, log_level="zz", load_models=("a",), tls_key=tmp_path
    )
    assert error.subject == "6 settings"
    lines = str(error).splitlines()[1:]
    starts = [
        "  --grpc-port: got -1, expected 0 to 65535. ",
        "  --drain-seconds: got nan, expected 0 or more. ",
        "  --log-level: got 'zz', expected one of debug, ",
        f"  REPOSITORY: got {tmp_path / 'none'}, which is not there, expected a directory of bundles. ",
        "  --load-model: got it with --model-control none, expected --model-control explicit. ",
        "  --tls-certificate and --tls-key: got one without the other, expected both or none. ",
    ]
    assert all(line.startswith(start) and line.endswith(".") for line, start in zip(lines, starts, strict=True))


def test_an_unknown_transport(tmp_path: Path) -> None:
    assert refused(tmp_path, transport="zz").expected == "one of auto, grpcio, nghttp2"


@pytest.fixture(params=["absent", "older", "newer"])
def unusable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of nghttp2 cannot be used."""
    if request.param == "absent":
        monkeypatch.setitem(sys.modules, "ngh2", None)
    else:
        monkeypatch.setattr(ngh2, "__version__", {"older": "0.2.9", "newer": "0.3.1"}[request.param])


@pytest.mark.usefixtures("unusable")
def test_a_transport_without_its_library(tmp_path: Path) -> None:
    error = refused(tmp_path, transport="nghttp2")
    assert (error.subject, error.expected) == ("--transport", "the package ngh2 0.3.0")
    assert error.fix == "Install it: pip install 'fewheads[fast]'."
    name, reason = choose_transport("auto")
    assert name == "grpcio"
    assert "pip install 'fewheads[fast]'" in reason


@pytest.mark.parametrize(("wanted", "chosen"), [("auto", "nghttp2"), ("nghttp2", "nghttp2"), ("grpcio", "grpcio")])
def test_the_transport_that_is_chosen(wanted: str, chosen: str) -> None:
    assert choose_transport(wanted).name == chosen


def test_the_extra_installs_the_version_that_can_be_used() -> None:
    assert f'fast = ["ngh2=={NGH2_VERSION}", ' in (ROOT / "pyproject.toml").read_text()
