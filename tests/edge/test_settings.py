"""The server's settings: declarations, bounds, rules, and all errors at once."""

import dataclasses
import math
import re
import sys
from pathlib import Path

import ngh2
import pytest

from edge.cli.serve import serve
from edge.errors import UsageError
from edge.settings import DECLARATIONS, NGH2_VERSION, Settings, choose_transport

ROOT = Path(__file__).parent.parent.parent
TLS = {"tls_certificate": Path("c"), "tls_key": Path("k")}
POLL, EXPLICIT, ON_DEMAND = ({"model_control": mode} for mode in ("poll", "explicit", "on-demand"))
NAN, INF = math.nan, math.inf


def refused(repository, **wrong):
    with pytest.raises(UsageError) as caught:
        Settings(repository=repository, **wrong)
    assert caught.value.fix.endswith(".")
    return caught.value


#: Setting to good values, the smallest and the largest among them, to bad ones, and the expectation in the message.
VALUES = {
    "grpc_port": ((0, 65535), (-1, 65536, 10**20), "0 to 65535"),
    "metrics_port": ((0, 65535), (-1, 65536), "0 to 65535"),
    "http_port": ((0, 65535), (-1, 65536), "0 to 65535"),
    "max_message_bytes": ((1, 2**31 - 1), (0, 2**31, 10**30), "1 to 2147483647"),
    "max_queue_size": ((1, 2**31 - 1), (0, 2**31), "1 to 2147483647"),
    "max_queue_bytes": ((1, 2**63 - 1), (0, 2**63), "1 to 9223372036854775807"),
    "instances": ((1, 64), (0, 65), "1 to 64"),
    "cache_mib": ((None, 1, 2**31 - 1), (0, 2**31), "1 to 2147483647"),
    "max_queue_delay_us": ((0, 1_000_000), (-1, 1_000_001), "0 to 1000000"),
    "default_timeout_ms": ((0, INF), (-1.0, NAN), "0 or more"),
    "drain_seconds": ((0, INF), (-0.1, -INF, NAN), "0 or more"),
    "watchdog_seconds": ((0.1, INF), (0.09, NAN), "0.1 or more"),
    "stuck_exit_seconds": ((0, INF), (-1.0, NAN), "0 or more"),
    "memory_headroom_bytes": ((0, 2**63 - 1), (-1, 2**63), "0 to 9223372036854775807"),
    "poll_seconds": ((0.1, 86400), (0.09, 86401, INF, NAN), "0.1 to 86400"),
    "max_shared_memory_bytes": ((1, 2**63 - 1), (0, 2**63), "1 to 9223372036854775807"),
    "trace_ratio": ((0, 1), (-0.1, 1.1, NAN), "0 to 1"),
    "transport": (("auto", "grpcio", "nghttp2"), ("zz",), "one of auto, grpcio, nghttp2"),
    "policy": ((None, "pinned", "router", "deadline", "load"), ("fast",), "one of pinned, router, deadline, load"),
    "model_control": (("none", "poll", "explicit", "on-demand"), ("POLL",), "one of none, poll, explicit, on-demand"),
    "max_loaded": ((None,), (0,), "1 to 2147483647"),
    "log_level": (("debug", "info", "warning", "error"), ("trace",), "one of debug, info, warning, error"),
    "log_format": (("default", "ISO8601", "json"), ("xml",), "one of default, ISO8601, json"),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_have_bounds_or_choices(tmp_path, name):
    good, bad, expected = VALUES[name]
    for value in good:
        assert getattr(Settings(repository=tmp_path, **{name: value}), name) == value
    for value in bad:
        error = refused(tmp_path, **{name: value})
        assert (error.subject, str(error.given), error.expected) == (
            DECLARATIONS[name].option_for(name),
            str(value),
            expected,
        )


def test_every_setting_with_bounds_or_choices_is_in_the_table():
    assert {name for name, it in DECLARATIONS.items() if it.least is not None or it.choices} == set(VALUES)


def test_settings_that_contradict_each_other(tmp_path):
    for wrong, message in (
        ({"grpc_port": 9000, "metrics_port": 9000}, "--metrics-port: got 9000, expected another port than gRPC's. "),
        ({"http_port": 8001}, "--http-port: got 8001, expected another port than gRPC's and the metrics'. "),
        ({"http_port": 8002}, "--http-port: got 8002, expected another port than gRPC's and the metrics'. "),
        ({"http_port": 0, "http_socket": Path("s")}, "--http-port: got 0, expected none beside --http-socket. "),
        ({"grpc_socket": Path("s"), "http_socket": Path("s")}, "--http-socket: got 's', expected another path than "),
        ({"trace_endpoint": "host:4317"}, "--trace-endpoint: got 'host:4317', expected http://HOST:PORT or https://"),
        ({**POLL, "load_models": ("a",)}, "--load-model: got --model-control poll, expected --model-control explicit"),
        ({**EXPLICIT, "load_models": ("*", "a")}, "--load-model: got ['*', 'a'], expected * alone, or names. "),
        ({"pinned": ("a",)}, "--pin: got --model-control none, expected --model-control on-demand. "),
        ({**EXPLICIT, "max_loaded": 2}, "--max-loaded: got --model-control explicit, expected --model-control on-dem"),
        ({**ON_DEMAND, "max_loaded": 2, "pinned": ("a", "b")}, "--max-loaded: got 2, expected more than the 2 that --"),
        ({"tls_key": Path("k")}, "--tls-certificate and --tls-key: got --tls-key alone, expected both or none. "),
        ({"tls_certificate": Path("c")}, "--tls-certificate and --tls-key: got --tls-certificate alone, expected both"),
        ({"tls_client_ca": Path("a")}, "--tls-client-ca: got no --tls-certificate, expected --tls-certificate and "),
    ):
        assert str(refused(tmp_path, **wrong)).startswith(message)


def test_settings_that_fit_together(tmp_path):
    fitting = (
        {"grpc_port": 0, "metrics_port": 0, "http_port": 0},
        {"grpc_port": 8002, "metrics_port": None},
        {"grpc_port": 8002, "grpc_socket": Path("s")},
        {**EXPLICIT, "load_models": ("*",), "trace_endpoint": "https://host:4317"},
        {**ON_DEMAND, "max_loaded": 2, "pinned": ("a", "a")},
        {**EXPLICIT, **TLS, "load_models": ("a", "b"), "tls_client_ca": Path("a")},
    )
    for good in fitting:
        settings = Settings(repository=tmp_path, **good)
        assert {name: getattr(settings, name) for name in good} == good


def test_repository_must_be_a_directory(tmp_path):
    for path, problem in ((tmp_path / "none", "does not exist"), (Path(__file__), "is a file")):
        start = f"REPOSITORY: got {path}, which {problem}, expected a directory of bundles. "
        assert str(refused(path)).startswith(start)


def test_warnings_of_a_server_on_the_network(tmp_path):
    for given, risks in (
        ({}, []),
        ({"host": "localhost"}, []),
        ({"host": "::1"}, []),
        ({"host": "nano.local"}, ["may send requests", "requests and responses can be read"]),
        ({"host": "::", "tokens": Path("t")}, ["requests, responses and tokens can be read"]),
        ({"host": "10.0.0.1", **TLS}, ["may send requests"]),
        ({"host": "10.0.0.1", **TLS, "tokens": Path("t")}, []),
        ({"host": "10.0.0.1", **TLS, "tls_client_ca": Path("a")}, []),
    ):
        warnings = Settings(repository=tmp_path, **given).exposure_warnings()
        assert len(warnings) == len(risks)
        assert all(risk in text for risk, text in zip(risks, warnings, strict=True))


def test_urls_of_ports(tmp_path):
    for given, url in (
        ({}, "http://127.0.0.1:8002"),
        ({"host": "::1"}, "http://[::1]:8002"),
        (TLS, "https://127.0.0.1:8002"),
    ):
        assert Settings(repository=tmp_path, **given).url(8002) == url


def test_every_setting_is_an_option_with_help_and_the_same_default(tmp_path, monkeypatch):
    monkeypatch.delenv("FEWHEADS_CACHE", raising=False)
    names = [field.name for field in dataclasses.fields(Settings)]
    assert list(DECLARATIONS) == names
    assert all(re.fullmatch(r"[A-Z].*\.", DECLARATIONS[name].help) for name in names)
    options = {parameter.name: parameter.opts[0] for parameter in serve.params}
    # These three are not settings of their own.
    assert [options.pop(name) for name in ("no_metrics", "as_json", "config")] == ["--no-metrics", "--json", "--config"]
    expected = {name: DECLARATIONS[name].option_for(name) for name in names}
    assert options == expected | {"repository": "repository"}
    given = serve.make_context("serve", [str(tmp_path)]).params
    assert (given.pop("no_metrics"), given.pop("as_json")) == (False, False)
    settings = Settings(repository=tmp_path)
    assert (settings.host, settings.grpc_port, settings.metrics_port) == ("127.0.0.1", 8001, 8002)
    assert settings.http_port is None
    assert (settings.target, settings.model_control, settings.strict_readiness) == ("auto", "none", True)
    assert not settings.allow_shared_memory
    assert not settings.allow_log_settings
    assert given == {name: getattr(settings, name) for name in DECLARATIONS}


def test_all_errors_are_reported_at_once(tmp_path):
    error = refused(tmp_path, grpc_port=-1, log_level="zz", load_models=("a",), tls_key=tmp_path)
    first, *lines = str(error).splitlines()
    assert first == "4 settings: got wrong values, expected none. Correct each:"
    options = ["  --log-level", "  --grpc-port", "  --load-model", "  --tls-certificate and --tls-key"]
    assert [line.partition(": got ")[0] for line in lines] == options
    assert all(line.endswith(".") for line in lines)


@pytest.mark.parametrize("version", [None, "0.2.9", "0.3.1"])
def test_transport_without_its_library(tmp_path, monkeypatch, version):
    if version:
        monkeypatch.setattr(ngh2, "__version__", version)
    else:
        monkeypatch.setitem(sys.modules, "ngh2", None)
    error = refused(tmp_path, transport="nghttp2")
    assert (error.subject, error.expected) == ("--transport", "the package ngh2 0.3.0")
    assert error.fix == "Install it: pip install 'fewheads[fast]'."
    name, reason = choose_transport("auto")
    assert name == "grpcio"
    assert "pip install 'fewheads[fast]'" in reason


def test_choice_of_the_transport():
    chosen = {wanted: choose_transport(wanted).name for wanted in ("auto", "nghttp2", "grpcio")}
    assert chosen == {"auto": "nghttp2", "nghttp2": "nghttp2", "grpcio": "grpcio"}
    assert f'fast = ["ngh2=={NGH2_VERSION}", ' in (ROOT / "pyproject.toml").read_text()
