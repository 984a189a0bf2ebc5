"""Facts about a Jetson and of containers on it, from file trees, and the checks with their advice."""

import os
import shutil
import socket
import subprocess

import click
import msgspec
import onnxruntime
import pytest

from edge.__main__ import cli
from edge.cli.doctor import Check, driver_version, jetson_checks, places_to_listen, runtime_checks
from edge.instruments.board import BoardInfo, Release, parse_release, read_board
from edge.runtimes.table import RUNTIMES
from tests.support import boards
from tests.support.boards import KERNELS, MODELS, RELEASES, SWAPS, in_container, link, orin_nano, write

CUDA = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
RELEASE = "etc/nv_tegra_release"
MOUNT = "Start the container with -v /etc/nv_tegra_release:/etc/nv_tegra_release:ro"
FOR_36, FOR_39 = "made for L4T 36.4, the host has ", "made for L4T 39.2, the host has "
NO_SWAP = "Building an engine may run out of memory. On the board: sudo fallocate -l 8G /swapfile && sudo chmod 600"
NO_DRIVER = "libcuda-that-is-not-there.so.1"
WITHOUT_DRIVER = (
    'Start the container with --runtime nvidia, or set "default-runtime": "nvidia" in /etc/docker/daemon.json and '
    "restart Docker. If Docker has no such runtime, install nvidia-container-toolkit."
)
JETPACKS = "Update the board to JetPack 6.2 or 7.2."
DEFAULT = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}


def checks(root, environment=None, driver=NO_DRIVER):
    found = list(jetson_checks(read_board(root), root, environment or {}, driver))
    named = {check.name: check for check in found}
    assert len(named) == len(found)
    assert all((check.status == "ok") == (check.advice == "") for check in found)
    return named


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    directory = tmp_path_factory.mktemp("driver")
    source, library = directory / "driver.c", directory / "libcuda.so.1"
    source.write_text(
        "#include <stdlib.h>\n"
        'int cuDriverGetVersion(int *version) { *version = 12060; return getenv("DRIVER_FAILS") ? 999 : 0; }\n'
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


def test_complete_board_is_ok(tmp_path, driver):
    found = checks(orin_nano(tmp_path, 6), driver=driver)
    found.pop("pycuda")  # a package of this machine
    assert {name: check.found for name, check in found.items() if check.status == "ok"} == {
        "jetson": f"{MODELS[6]}, tegra234",
        "jetpack": "6.2.2, L4T 36.5.2",
        "power mode": "MAXN_SUPER, of 15W, 25W, MAXN_SUPER, 7W",
        "super firmware": "yes",
        "cuda driver": "CUDA 12.6",
        "swap": "zram 3810 MiB",
        "largest free blocks": "157 of 4096 KiB",
    }
    assert all(check.status == "ok" for check in found.values())


def test_other_machines_are_not_jetsons(tmp_path):
    assert list(checks(tmp_path).values()) == [Check("jetson", "ok", "no")]
    check = checks(tmp_path, image("r36.4"))["image"]
    assert (check.status, check.found) == ("failed", "made for L4T 36.4, and this machine is not a Jetson")
    assert check.advice == "Run the image on a Jetson; elsewhere install the package."


class Case(msgspec.Struct, frozen=True):
    """A check, its result, and the board: ``files`` to change or remove, and ``mounts`` of a container."""

    check: str
    status: str
    found: str
    advice: str = ""
    jetpack: int = 6
    files: dict[str, str | None] = {}
    mounts: tuple[str, ...] | None = None
    environment: dict[str, str] = {}


def release(line):
    return {RELEASE: f"# {line}, GCID: 1\n"}


def image(release):
    return {"FEWHEADS_IMAGE_L4T": release}


def build(jetpack):
    command = f"docker build -f jetson.Dockerfile --build-arg JETPACK={jetpack} -t fewheads:jp{jetpack} ."
    return f"Run fewheads:jp{jetpack}, or build it: {command}"


SLOW_GPU = {"sys/class/devfreq/17000000.gpu/available_frequencies": "306000000 624750000\n"}
SLOW = "no, the GPU is limited to 624.75 MHz"
FLASH = "Flash the board again as jetson-orin-nano-devkit-super, then sudo nvpmodel -m 2."
DEVICES = "Start the container with -e NVIDIA_VISIBLE_DEVICES=all and --runtime nvidia."
CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
COMPUTE = "Start the container with -e NVIDIA_DRIVER_CAPABILITIES=compute,utility."
COMPACT = "Memory is fragmented: sync && sudo sysctl vm.drop_caches=3, or restart the board."
REMOVE = "Remove /usr/local/cuda-13.2/compat from the image: it is for discrete GPUs"
HIDING = "/usr/local/cuda-13.2/compat has a CUDA driver"
LESS = "Set NVIDIA_DRIVER_CAPABILITIES=compute,utility: some releases of NVIDIA's runtime fail on "
COMPAT = {"usr/local/cuda-13.2/compat/libcuda.so.595.71.05": ""}
FRAGMENTS = "Node 0, zone Normal 9 9 9 9 9 9 9 9 9 8 0\n"
SEEN = (RELEASE,)
NVMAP = "The GPU cannot allocate 4 GiB at once; L4T 36.5 can."
CONTIGUOUS = (
    "Decoders of many layers may not build: export them with --layers-per-block 6, or add cma=950M to APPEND in "
    "/boot/extlinux/extlinux.conf and restart."
)
CASES = [
    Case("jetpack", "absent", "unknown, L4T unknown", JETPACKS, files={RELEASE: None}),
    Case("jetpack", "warning", "unknown, L4T 40.1.0", "Fewheads is", files=release("R40 (release), REVISION: 1.0")),
    Case("jetpack", "warning", "5.1.2, L4T 35.4.1", JETPACKS, files=release("R35 (release), REVISION: 4.1")),
    Case("jetpack", "warning", "6.2.1, L4T 36.4.7", NVMAP, files=release("R36 (release), REVISION: 4.7")),
    Case("jetpack", "ok", "6.1, L4T 36.4.0", files=release("R36 (release), REVISION: 4.0")),
    Case("jetpack", "absent", "unknown, L4T unknown", f"{MOUNT} to see it.", mounts=()),
    Case("power mode", "absent", "unknown", "Mount /etc/nvpmodel.conf, /etc/nvpmodel and /var/lib/nvpm", mounts=()),
    Case("power mode", "absent", "unknown", "Set one with sudo nvpmodel", files={"var/lib/nvpmodel/status": None}),
    # An image for a Jetson needs the GPU; another one may be for the CPU.
    Case("cuda driver", "failed", NO_DRIVER, WITHOUT_DRIVER, mounts=SEEN, environment=image("r36.4")),
    Case("cuda driver", "warning", NO_DRIVER, WITHOUT_DRIVER, mounts=SEEN, environment=DEFAULT),
    Case("cuda driver", "warning", NO_DRIVER, DEVICES, mounts=SEEN, environment={"NVIDIA_VISIBLE_DEVICES": "void"}),
    Case("cuda driver", "warning", NO_DRIVER, COMPUTE, mounts=SEEN, environment={CAPABILITIES: "utility"}),
    Case("cuda driver", "warning", NO_DRIVER, "Install JetPack's driver: sudo apt install nvidia-jetpack."),
    Case("container", "warning", f"{CAPABILITIES}=all", f"{LESS}all", mounts=SEEN, environment={CAPABILITIES: "all"}),
    Case("container", "ok", "yes", mounts=SEEN, environment=DEFAULT),
    Case("cuda-compat", "warning", HIDING, REMOVE, 7, COMPAT, SEEN),
    Case("image", "ok", "made for L4T 36.4, the host has L4T 36.5.2", mounts=SEEN, environment=image("r36.4")),
    Case("image", "failed", f"{FOR_36}L4T 35.4.1, which is older", JETPACKS, 5, {}, SEEN, image("r36.4")),
    Case("image", "failed", f"{FOR_36}L4T 39.2.1", build("7.2"), 7, mounts=SEEN, environment=image("r36.4")),
    Case("image", "failed", f"{FOR_39}L4T 36.5.2, which is older", build("6.2"), 6, {}, SEEN, image("r39.2")),
    # Without the release, the kernel rules images out.
    Case("image", "warning", f"{FOR_36}kernel 5.15.185-tegra", f"{MOUNT}, so", mounts=(), environment=image("r36.4")),
    Case("image", "failed", FOR_36, build("7.2"), 7, mounts=(), environment=image("r36.4")),
    Case("super firmware", "warning", SLOW, FLASH, 7, SLOW_GPU | release("R39 (release), REVISION: 2.0")),
    Case("super firmware", "absent", SLOW, "JetPack 6.2 and", 7, SLOW_GPU | release("R36 (release), REVISION: 4.2")),
    Case("swap", "warning", "none", NO_SWAP, files={"proc/swaps": f"{SWAPS}\n"}),
    Case("swap", "warning", "none", NO_SWAP, files={"proc/swaps": f"{SWAPS}/swapfile file N/A 0 -2\n"}),
    Case("swap", "ok", "file 8192 MiB", files={"proc/swaps": f"{SWAPS}/swapfile file 8388604 0 -2\n"}),
    Case("contiguous memory", "absent", "256 MiB", CONTIGUOUS, files={"proc/meminfo": "CmaTotal:  262144 kB\n"}),
    Case("contiguous memory", "ok", "950 MiB", files={"proc/meminfo": "CmaTotal:  972800 kB\n"}),
    Case("largest free blocks", "warning", "8 of 2048 KiB", COMPACT, files={"proc/buddyinfo": FRAGMENTS}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.check}, {case.found}")
def test_result_and_advice(tmp_path, case):
    root = orin_nano(tmp_path, case.jetpack)
    for name, text in case.files.items():
        (root / name).unlink(missing_ok=True)
        if text is not None:
            write(root, {name: text})
    if case.mounts is not None:
        in_container(root, *case.mounts)
    check = checks(root, case.environment)[case.check]
    assert check.status == case.status
    assert check.found.startswith(case.found)
    assert check.advice.startswith(case.advice)


def test_checks_that_do_not_apply_are_left_out(tmp_path):
    root = write(in_container(orin_nano(tmp_path, 7)), {"usr/local/cuda-13.2/compat_orin/libcuda.so.1": ""})
    assert not {"cuda-compat", "super firmware", "image", "gpu access"} & set(checks(root))


def test_driver_version_reports_other_libraries_and_errors(monkeypatch, driver):
    with pytest.raises(OSError, match=r"libc.so.6 is not a CUDA driver"):
        driver_version("libc.so.6")
    monkeypatch.setenv("DRIVER_FAILS", "1")
    with pytest.raises(OSError, match=r"libcuda.so.1 returns CUDA error 999"):
        driver_version(driver)


@pytest.mark.parametrize("contained", [True, False])
def test_device_files_without_access(tmp_path, monkeypatch, contained):
    root = write(orin_nano(tmp_path, 6), {"dev/nvmap": "", "dev/nvhost-ctrl-gpu": ""})
    if contained:
        in_container(root, RELEASE)
    assert "gpu access" not in checks(root)
    monkeypatch.setattr(
        os, "access", lambda path, mode: (path.name, mode) != ("nvmap", os.R_OK | os.W_OK)
    )  # of root, too
    check = checks(root)["gpu access"]
    group = (root / "dev/nvmap").stat().st_gid
    assert (check.status, check.found) == ("failed", f"user {os.geteuid()} has no access to /dev/nvmap")
    way_out = f"--group-add {group}" if contained else f"sudo usermod -aG {group} USER"
    assert way_out in check.advice


@pytest.mark.skipif(CUDA, reason="this ONNX Runtime has CUDA")
def test_idle_gpu_of_a_jetson_is_a_warning():
    found = {check.name: check for check in runtime_checks(on_jetson=False)}
    assert set(found) == {"runtime", *RUNTIMES}
    assert (found["runtime"].status, found["runtime"].advice) == ("ok", "")
    assert (found["onnxruntime-cuda"].status, found["onnxruntime"].found) == ("absent", onnxruntime.__version__)
    (runtime,) = [check for check in runtime_checks(on_jetson=True) if check.name == "runtime"]
    assert runtime.status == "warning"
    assert runtime.found.endswith("runs on the CPU.")
    assert runtime.advice.startswith("The GPU stays idle. Install JetPack's python3-libnvinfer and pycuda, or an ONNX")


VERSIONS = {5: ("35.4.1", "5.1.2"), 6: ("36.5.2", "6.2.2"), 7: ("39.2.1", "7.2.1")}


def board(root):
    found = read_board(root)
    assert found
    return found


@pytest.mark.parametrize("jetpack", VERSIONS)
def test_facts_of_an_orin_nano(tmp_path, jetpack):
    l4t, name = VERSIONS[jetpack]
    root = orin_nano(tmp_path, jetpack)
    assert read_board(root) == BoardInfo(
        model=MODELS[jetpack],
        soc="tegra234",
        l4t=l4t,
        jetpack=name,
        power_mode=boards.POWER_MODES[jetpack][boards.POWER_MODE[jetpack]],
        power_modes=tuple(boards.POWER_MODES[jetpack]),
        super_firmware=jetpack != 5,
        kernel=KERNELS[jetpack],
    )
    assert read_board(in_container(root)) == BoardInfo("NVIDIA Jetson", kernel=KERNELS[jetpack])


@pytest.mark.parametrize(
    "files",
    [{}, {"proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0"}, {"etc/nvpmodel.conf": "< POWER_MODEL"}],
)
def test_other_machines_are_no_board(tmp_path, files):
    files = {"proc/sys/kernel/osrelease": "6.8.0-60-generic\n", **files}
    assert read_board(write(tmp_path, files)) is None


def test_releases():
    for line, release, jetpack in (
        ("# R36 (release), REVISION: 4.0, GCID: 1, BOARD: generic", Release(36, 4, 0), "6.1"),
        ("# R40 (release), REVISION: 1.0, GCID: 1, BOARD: generic", Release(40, 1, 0), None),
        ("# R36 (release), REVISION: 3, GCID: 1, BOARD: generic", Release(36, 3), "6.0"),
        ("r36.4", Release(36, 4), None),  # two JetPacks have it
        ("39.2.1", Release(39, 2, 1), "7.2.1"),
    ):
        assert parse_release(line) == release
        assert release.jetpack == jetpack


@pytest.mark.parametrize("text", ["", "# R36", "R (release), REVISION: .", "latest", "36", "r36.x", "٣٦.٤", "N/A"])
def test_other_text_is_not_a_release(tmp_path, text):
    assert parse_release(text) is None
    found = board(write(tmp_path, {"etc/nv_tegra_release": f"{text}\n"}))
    assert (found.l4t, found.jetpack) == (text.strip("# ") or None, None)


def test_board_runs_images_of_its_release_or_else_of_its_kernel():
    for host, image, runs in (
        ("36.4.3", Release(36, 4), True),
        ("36.5.2", Release(36, 4), True),
        ("36.3.0", Release(36, 4), False),
        ("39.2.1", Release(36, 4), False),
        ("36.4.3", Release(39, 2), False),
    ):
        assert BoardInfo("NVIDIA Jetson", l4t=host).runs(image) is runs
    for kernel, r36, r39 in (
        ("5.10.120-tegra", False, False),
        ("5.15.148-tegra", None, False),
        ("6.8.12-1021-tegra", False, None),
        (None, None, None),
    ):
        found = BoardInfo("NVIDIA Jetson", kernel=kernel)
        assert (found.runs(Release(36, 4)), found.runs(Release(39, 4))) == (r36, r39)


@pytest.mark.parametrize(
    ("status", "config", "mode"),
    [
        ("pmode:0002 fmode:fan_mode_quiet\n", "< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n", "MAXN_SUPER"),
        ("pmode:0003\n", "< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n", "mode 3"),
        ("pmode:0000 fmode:quiet\n", None, "mode 0"),
        ("N/A\n", "< POWER_MODEL ID=0 NAME=15W >\n", None),
        (None, "< POWER_MODEL ID=0 NAME=15W >\n< PM_CONFIG DEFAULT=0 >\n", None),  # the default need not be active
    ],
)
def test_power_mode(tmp_path, status, config, mode):
    files = {"etc/nv_tegra_release": RELEASES[6], "var/lib/nvpmodel/status": status, "etc/nvpmodel.conf": config}
    assert board(write(tmp_path, {path: text for path, text in files.items() if text is not None})).power_mode == mode


@pytest.mark.parametrize(
    ("limit", "firmware"), [("624750000", False), ("612000000", True), ("918000000", True), ("N/A", True)]
)
def test_firmware_by_the_clocks(tmp_path, limit, firmware):
    """A limit below that of other firmware comes from a power mode; then the names of the power modes decide."""
    root = orin_nano(tmp_path, 6)
    gpu = root / "sys/class/devfreq/17000000.gpu"
    # JetPack 7.2's installer leaves the name and the power modes of Super without its clocks.
    write(gpu, {"available_frequencies": "306000000 612000000 624750000\n"})
    assert board(root).super_firmware is False
    (gpu / "available_frequencies").unlink()
    write(gpu, {"max_freq": f"{limit}\n"})
    assert board(root).super_firmware is firmware
    (root / "etc/nvpmodel/nvpmodel_p3767_0003_super.conf").write_text("< POWER_MODEL ID=0 NAME=15W >\n")
    assert board(root).super_firmware is (limit == "918000000")
    (root / "etc/nvpmodel.conf").unlink()  # then the name of the board decides
    assert board(root).super_firmware is (limit != "624750000")


def test_broken_files_give_no_facts(tmp_path):
    root = orin_nano(tmp_path, 6)
    for path in ("proc/device-tree/model", "proc/device-tree/compatible", "var/lib/nvpmodel/status"):
        (root / path).write_bytes(b"\xff\xfe\0Jetson\n\x1b[31m" * 40)
    (root / "etc/nvpmodel.conf").unlink()
    link(root / "etc/nvpmodel.conf", "nvpmodel.conf")
    (root / "etc/nv_tegra_release").unlink()
    (root / "etc/nv_tegra_release").mkdir()
    found = board(root)
    assert (found.model, found.l4t, found.power_mode, found.power_modes) == ("NVIDIA Jetson", None, None, ())


def test_ports_and_sockets_are_those_that_a_server_would_take(tmp_path, monkeypatch):
    def found():
        with click.Context(cli) as context:
            return {(each.name, each.status, each.found, each.advice) for each in places_to_listen(context)}

    taken, free, file = tmp_path / "taken", tmp_path / "free", tmp_path / "fewheads.toml"
    monkeypatch.setenv("FEWHEADS_SERVE_GRPC_SOCKET", str(taken))
    monkeypatch.setenv("FEWHEADS_SERVE_CONFIG", str(file))
    with socket.socket(socket.AF_UNIX) as other, socket.create_server(("127.0.0.1", 0)) as busy:
        other.bind(str(taken))
        other.listen()
        port = busy.getsockname()[1]
        file.write_text(f'metrics-port = {port}\nhttp-socket = "{free}"')
        expected = {
            (f"socket {taken}", "warning", "the socket of another server", "Stop that server, or give another path."),
            (f"socket {free}", "ok", "free", ""),
        }
        (of_port,) = found() - expected
        assert (of_port[:2], of_port[3]) == ((f"port {port}", "warning"), "Serve on another one with --metrics-port.")
        assert "in use" in of_port[2]
        assert taken.is_socket()
    file.write_text("no-metrics = true\nhttp-port = 0")
    taken.unlink()
    assert found() == {(f"socket {taken}", "ok", "free", "")}
    assert not taken.exists()
    file.write_text("metric-port = 1")
    ((name, status, given, _),) = found()
    assert (name, status) == ("options", "failed")
    assert "Did you mean metrics-port?" in given
