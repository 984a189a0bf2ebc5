"""compose.yaml: its schema, its restrictions, and its agreement with README.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from edge.cli.serve import serve
from tests.deploy.test_container import image_variables
from tests.support.tools import DEPLOY, run, tool

yaml = pytest.importorskip("yaml")
FILE = DEPLOY / "compose.yaml"
SERVICES: dict[str, Any] = yaml.safe_load(FILE.read_text())["services"]
SERVER = SERVICES["server"]


def test_schema(tmp_path: Path) -> None:
    program = tool("check-jsonschema", "pip install check-jsonschema")
    done = run(program, "--builtin-schema", "vendor.compose-spec", FILE)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / FILE.name
    wrong.write_text(FILE.read_text().replace("read_only: true", "readonly: true"))
    assert run(program, "--builtin-schema", "vendor.compose-spec", wrong).returncode == 1


@pytest.mark.parametrize("name", SERVICES)
def test_services_are_confined(name: str) -> None:
    service = SERVICES[name]
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert {"privileged", "cap_add", "user", "network_mode", "pid", "ipc", "devices"}.isdisjoint(service)
    assert "mem_limit" in service
    address = "${BIND_ADDRESS:-127.0.0.1}" if name == "server" else "127.0.0.1"  # the others have no tokens
    for port in service["ports"]:
        assert port.startswith(f"{address}:"), "a port is open to the network"
    for mount in service["volumes"]:
        if isinstance(mount, str):
            assert mount.endswith(":ro") or not mount.startswith((".", "/")), mount
        else:
            assert mount["type"] == "volume" or mount["read_only"], mount


def test_command_agrees_with_the_mounts() -> None:
    mounts = {mount["target"]: mount for mount in SERVER["volumes"]}
    name, *arguments = SERVER["command"]
    context = serve.make_context(name, arguments)
    assert str(context.params["repository"]) in mounts
    assert mounts[image_variables("6.2")["FEWHEADS_CACHE"]]["type"] == "volume"
    assert mounts["/etc/nv_tegra_release"]["bind"] == {"create_host_path": False}
    assert SERVER["runtime"] == "nvidia"
    published = {int(port.rsplit(":", 1)[1]) for port in SERVER["ports"]}
    assert published == {context.params[f"{kind}_port"] for kind in ("grpc", "http", "metrics")}
    assert int(SERVER["stop_grace_period"].removesuffix("s")) > context.params["drain_seconds"] + 3


def test_variables_are_explained() -> None:
    example = (DEPLOY / "example.env").read_text()
    assert set(re.findall(r"\$\{(\w+)", FILE.read_text())) == set(re.findall(r"^(\w+)=", example, re.MULTILINE))
    for name, value in re.findall(r"^(\w+)=(.+)$", example, re.MULTILINE):
        assert f"${{{name}:-{value}}}" in FILE.read_text(), name
