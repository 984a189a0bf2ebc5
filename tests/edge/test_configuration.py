"""Options of commands from the environment and a file: their values, their order, and mistakes in them."""

import math

import click
import pytest

from edge.__main__ import cli
from edge.errors import FewheadsError
from edge.launch import running_server
from edge.settings import DECLARATIONS
from tests.support.commands import shown

SERVE = cli.get_command(click.Context(cli), "serve")
OPTIONS = [each for each in SERVE.params if isinstance(each, click.Option) and each.name != "config"]
#: A value that no option has by default, by the type of the option; flags get the other word.
SAMPLES = {"integer": 7, "float": math.inf, "text": "word", "path": "some/path", "function": "3:4"}


def values(*arguments):
    return SERVE.make_context("serve", [*map(str, arguments)]).params


def sample(option):
    if option.is_flag:
        return not values()[option.name]
    words = DECLARATIONS[option.name].choices if option.name in DECLARATIONS else ()
    value = words[-1] if words else SAMPLES[option.type.name if option.type.name in SAMPLES else "function"]
    return [value, "and"] if option.multiple else value


def wrong(*arguments):
    """Return the message of a start of a server that fails with exit code 2."""
    with pytest.raises((FewheadsError, click.UsageError)) as refused:
        cli.main(["serve", *arguments], standalone_mode=False)
    assert refused.value.exit_code == 2
    return refused.value.format_message() if isinstance(refused.value, click.UsageError) else str(refused.value)


def as_toml(value):
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.opts[0])
def test_every_option_is_a_variable_and_a_key(option, tmp_path, monkeypatch):
    monkeypatch.delenv("FEWHEADS_CACHE", raising=False)
    value, name = sample(option), option.opts[0]
    if option.is_flag:
        arguments = [name if value else f"--no-{name.removeprefix('--')}"]
    else:
        arguments = [f"{name}={each}" for each in (value if option.multiple else [value])]
    expected = values(*arguments)
    assert expected[option.name] != values()[option.name]
    file = tmp_path / "fewheads.toml"
    file.write_text(f"{name.removeprefix('--')} = {as_toml(value)}\n")
    assert values("--config", file) == expected
    variable = "FEWHEADS_CACHE" if name == "--cache" else f"FEWHEADS_SERVE_{name[2:].upper().replace('-', '_')}"
    monkeypatch.setenv(variable, " ".join(value) if option.multiple else str(value))
    assert values() == expected
    assert f"env var: {variable}" in " ".join(shown("serve", "--help").replace("-\n", "-").split())


def test_order_of_option_variable_file_and_default(tmp_path, monkeypatch):
    file = tmp_path / "fewheads.toml"
    file.write_text('grpc-port = 1\nhttp-port = 1\nrepository = "file"\ncache = "file"\nbuild = false\n')
    monkeypatch.setenv("FEWHEADS_SERVE_CONFIG", str(file))
    monkeypatch.delenv("FEWHEADS_CACHE", raising=False)
    names = ("grpc_port", "http_port", "metrics_port", "repository", "cache", "build")
    assert [str(values()[name]) for name in names] == ["1", "1", "8002", "file", "file", "False"]
    for name, value in {"GRPC_PORT": 2, "HTTP_PORT": 2, "REPOSITORY": "variable", "BUILD": "on", "TARGET": ""}.items():
        monkeypatch.setenv(f"FEWHEADS_SERVE_{name}", str(value))
    monkeypatch.setenv("FEWHEADS_CACHE", "variable")
    monkeypatch.setenv("FEWHEADS_SERVE_PORT_8001_TCP_ADDR", "10.0.0.1")  # Kubernetes', of a service fewheads-serve
    monkeypatch.setenv("FEWHEADS_SERVE_SERVICE_HOST", "10.0.0.1")
    assert [str(values()[name]) for name in names] == ["2", "2", "8002", "variable", "variable", "True"]
    assert values()["target"] == "auto"  # an empty variable is none
    given = values("line", "--grpc-port=3", "--cache=line", "--no-build")
    assert [str(given[name]) for name in names] == ["3", "2", "8002", "line", "line", "False"]


def test_server_of_another_command_takes_no_variables(monkeypatch):
    monkeypatch.setenv("FEWHEADS_SERVE_HTTP_PORT", "0")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "collector")  # which no server takes
    with running_server([]) as ready:
        assert ready.http_port is None


def test_other_commands_of_a_device_have_variables(monkeypatch):
    monkeypatch.setenv("FEWHEADS_TOP_INTERVAL", "2.5")
    monkeypatch.setenv("FEWHEADS_CACHE", "variable")
    for command, name, value in (
        ("top", "interval", "2.5"),
        ("build", "cache", "variable"),
        ("bench", "cache", "variable"),
    ):
        found = cli.get_command(click.Context(cli), command).make_context(command, ["x"] if command != "top" else [])
        assert str(found.params[name]) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "grpc-prt = 1",
            "{file}: grpc-prt: got an unknown name, expected an option of `fewheads serve` without --. Did"
            " you mean grpc-port?",
        ),
        ("grpc_port = 1", "Did you mean grpc-port?"),
        ("[serve]\ngrpc-port = 1", "{file}: serve: got an unknown name"),
        ("config = 'x'", "{file}: config: got an unknown name"),
        ("grpc-port = 'x'", "'--grpc-port' (grpc-port in {file}): 'x' is not a valid integer"),
        ("grpc-port = 80.5", "'--grpc-port' (grpc-port in {file}): '80.5' is not a valid integer"),
        ("grpc-port = true", "'--grpc-port' (grpc-port in {file}): 'true' is not a valid integer"),
        ("build = 3", "'--build' (build in {file}): '3' is not a valid boolean"),
        ("host = ['a']", "{file}: host: got ['a'], expected a text, a number, true or false. "),
        ("load-model = [['a']]", "{file}: load-model: got ['a'], expected a text"),
        (
            "grpc-port = 70000",
            "--grpc-port: got 70000, expected 0 to 65535. Take a free port, or 0 for any. --grpc-port"
            " comes from grpc-port in {file}.",
        ),
        ("rate-limit = 'x'", "--rate-limit comes from rate-limit in {file}."),
        ("tls-key = 'k'", "--tls-key comes from tls-key in {file}."),
        ("repository = 'none'", "REPOSITORY comes from repository in {file}."),
        ("grpc-port =", "--config {file}: got Invalid value (at end of document), expected TOML. "),
        ("\udcff", "--config {file}: got "),
        ("a = " + "[" * 100_000, "--config {file}: got "),
    ],
    ids=lambda text: text[:20],
)
def test_mistakes_in_the_file(text, message, tmp_path, monkeypatch):
    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "fewheads.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert message.format(file=file) in wrong("--config", str(file))


def test_file_that_is_none(tmp_path):
    for path in (tmp_path / "none", tmp_path, "/dev/zero"):
        message = f"--config {path}: got a path without a file, expected a file. Give its path."
        assert wrong("--config", str(path)) == message


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "GPRC_PORT",
            "1",
            "FEWHEADS_SERVE_GPRC_PORT: got an unknown name, expected the variable of an option of"
            " `fewheads serve`. Did you mean FEWHEADS_SERVE_GRPC_PORT?",
        ),
        ("TOKEN", "t", "Did you mean FEWHEADS_SERVE_TOKENS?"),
        ("CACHE", "c", "FEWHEADS_SERVE_CACHE: got an unknown name"),
        ("GRPC_PORT", "x", "'--grpc-port' (FEWHEADS_SERVE_GRPC_PORT): 'x' is not a valid integer"),
        (
            "GRPC_PORT",
            "-1",
            "0 to 65535. Take a free port, or 0 for any. --grpc-port comes from FEWHEADS_SERVE_GRPC_PORT.",
        ),
        ("BUILD", "maybe", "'--build' (FEWHEADS_SERVE_BUILD): 'maybe' is not a valid boolean"),
        ("LOAD_MODEL", "a b", "--load-model comes from FEWHEADS_SERVE_LOAD_MODEL."),
    ],
)
def test_mistakes_in_the_environment(name, value, message, tmp_path, monkeypatch):
    monkeypatch.setenv(f"FEWHEADS_SERVE_{name}", value)
    assert message in wrong(str(tmp_path))
    shown("serve", "--help")  # helps nevertheless
