"""The doctor on a Jetson and in containers on one, from file trees, with the advice for each problem."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import onnxruntime
import pytest

from edge.cli.checks import Check, driver_version, jetson_checks
from edge.cli.doctor import runtime_checks
from edge.instruments.board import read_board
from edge.runtimes.table import RUNTIMES
from tests.support.boards import BUDDYINFO, MODELS, SWAPS, in_container, orin_nano, write

CUDA = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
RELEASE = "etc/nv_tegra_release"
MODES = ("etc/nvpmodel.conf", "var/lib/nvpmodel/status")
JP62 = {"FEWHEADS_IMAGE_L4T": "r36.4"}
NO_DRIVER = "libcuda-that-is-not-there.so.1"
WITHOUT_DRIVER = (
    'Start the container with --runtime nvidia, or set "default-runtime": "nvidia" in /etc/docker/daemon.json and '
    "restart Docker. If Docker has no such runtime, install nvidia-container-toolkit."
)
DEFAULT = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}


def checks(root: Path, environment: Mapping[str, str] = {}, driver: str = NO_DRIVER) -> dict[str, Check]:
    found = list(jetson_checks(read_board(root), root, environment, driver))
    named = {check.name: check for check in found}
    assert len(named) == len(found)
    assert all((check.status == "ok") == (check.advice == "") for check in found)
    return named


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library that answers as JetPack 6's driver does."""
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


def test_a_board_that_lacks_nothing(tmp_path: Path, driver: str) -> None:
    found = checks(orin_nano(tmp_path, 6), driver=driver)
    assert {name: check.found for name, check in found.items() if check.status == "ok"} == {
        "jetson": f"{MODELS[6]}, tegra234",
        "jetpack": "6.2.2, L4T 36.5.2",
        "power mode": "MAXN_SUPER, of 15W, 25W, MAXN_SUPER, 7W",
        "super firmware": "yes",
        "cuda driver": "CUDA 12.6",
        "swap": "zram 3810 MiB",
        "largest free blocks": "157 of 4096 KiB",
        **({"pycuda": found["pycuda"].found} if found["pycuda"].status == "ok" else {}),
    }
    assert set(found) - {"pycuda"} == {name for name, check in found.items() if check.status == "ok"} - {"pycuda"}


def test_another_machine_is_none(tmp_path: Path) -> None:
    assert list(checks(tmp_path).values()) == [Check("jetson", "ok", "no")]
    image = checks(tmp_path, JP62)["image"]
    assert (image.status, image.found) == ("failed", "made for L4T 36.4, and this machine is not a Jetson")
    assert image.advice == "Run the image on a Jetson; elsewhere install the package."


@pytest.mark.parametrize(
    ("line", "status", "found", "advice"),
    [
        (None, "absent", "unknown, L4T unknown", "Update the board to JetPack 6.2 or 7.2."),
        ("who knows", "absent", "unknown, L4T who knows", "Update the board to JetPack 6.2 or 7.2."),
        (
            "# R40 (release), REVISION: 1.0, GCID: 1",
            "warning",
            "unknown, L4T 40.1.0",
            "Fewheads is made for JetPack 6.2 and 7.2.",
        ),
        (
            "# R35 (release), REVISION: 4.1, GCID: 33958178, BOARD: t186ref",
            "warning",
            "5.1.2, L4T 35.4.1",
            "Update the board to JetPack 6.2 or 7.2.",
        ),
        # Its TensorRT is 8.6.
        (
            "# R36 (release), REVISION: 3.0, GCID: 1",
            "warning",
            "6.0, L4T 36.3.0",
            "Update the board to JetPack 6.2 or 7.2.",
        ),
        ("# R36 (release), REVISION: 4.0, GCID: 1", "ok", "6.1, L4T 36.4.0", ""),
    ],
)
def test_jetpack(tmp_path: Path, line: str | None, status: str, found: str, advice: str) -> None:
    root = orin_nano(tmp_path, 6)
    (root / RELEASE).unlink()
    if line is not None:
        write(root, {RELEASE: f"{line}\n"})
    check = checks(root)["jetpack"]
    assert (check.status, check.found, check.advice) == (status, found, advice)


def test_a_container_that_sees_neither_release_nor_mode(tmp_path: Path, driver: str) -> None:
    found = checks(in_container(orin_nano(tmp_path, 6)), DEFAULT, driver)
    mount = "Start the container with -v /etc/nv_tegra_release:/etc/nv_tegra_release:ro to see it."
    assert (found["jetson"].found, found["jetpack"].advice) == ("NVIDIA Jetson", mount)
    mounts = "Mount /etc/nvpmodel.conf, /etc/nvpmodel and /var/lib/nvpmodel read-only to see it."
    assert (found["power mode"].status, found["power mode"].advice) == ("absent", mounts)
    assert (found["container"].status, found["cuda driver"].status) == ("ok", "ok")
    assert "super firmware" not in found
    in_image = checks(tmp_path, {**DEFAULT, **JP62}, driver)["image"]
    assert (in_image.status, in_image.found) == ("warning", "made for L4T 36.4, the host has kernel 5.15.185-tegra")
    assert in_image.advice.startswith("Start the container with -v /etc/nv_tegra_release:/etc/nv_tegra_release:ro, so")


@pytest.mark.parametrize("image", [True, False])
def test_a_container_without_the_nvidia_runtime(tmp_path: Path, image: bool) -> None:
    """An image for a Jetson needs the GPU; another one may be for the CPU."""
    root = in_container(orin_nano(tmp_path, 6), RELEASE, *MODES)
    check = checks(root, JP62 if image else {})["cuda driver"]
    assert (check.status, check.advice) == ("failed" if image else "warning", WITHOUT_DRIVER)
    assert NO_DRIVER in check.found


@pytest.mark.parametrize(
    ("variables", "advice"),
    [
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, "Start the container with -e NVIDIA_VISIBLE_DEVICES=all and --runtime"),
        ({"NVIDIA_VISIBLE_DEVICES": ""}, "Start the container with -e NVIDIA_VISIBLE_DEVICES=all and --runtime"),
        (
            {"NVIDIA_DRIVER_CAPABILITIES": "utility"},
            "Start the container with -e NVIDIA_DRIVER_CAPABILITIES=compute,utility.",
        ),
        ({"NVIDIA_DRIVER_CAPABILITIES": ""}, WITHOUT_DRIVER),
        (DEFAULT, WITHOUT_DRIVER),
    ],
)
def test_why_a_container_has_no_driver(tmp_path: Path, variables: dict[str, str], advice: str) -> None:
    root = in_container(orin_nano(tmp_path, 6), RELEASE)
    assert checks(root, {**JP62, **variables})["cuda driver"].advice.startswith(advice)


def test_a_board_without_a_driver(tmp_path: Path) -> None:
    check = checks(orin_nano(tmp_path, 6))["cuda driver"]
    assert (check.status, check.advice) == ("warning", "Install JetPack's driver: sudo apt install nvidia-jetpack.")


def test_what_answers_is_no_driver(monkeypatch: pytest.MonkeyPatch, driver: str) -> None:
    with pytest.raises(OSError, match=r"libc.so.6 is not a CUDA driver"):
        driver_version("libc.so.6")
    monkeypatch.setenv("DRIVER_FAILS", "1")
    with pytest.raises(OSError, match=r"libcuda.so.1 returns CUDA error 999"):
        driver_version(driver)


@pytest.mark.parametrize("capabilities", ["all", "compute,utility,graphics", "display,compute"])
def test_capabilities_that_break_the_runtime(tmp_path: Path, capabilities: str) -> None:
    root = in_container(orin_nano(tmp_path, 6), RELEASE)
    check = checks(root, {"NVIDIA_DRIVER_CAPABILITIES": capabilities})["container"]
    assert (check.status, check.found) == ("warning", f"NVIDIA_DRIVER_CAPABILITIES={capabilities}")
    assert check.advice.startswith("Set NVIDIA_DRIVER_CAPABILITIES=compute,utility: some releases of NVIDIA's runtime")


def test_a_driver_for_discrete_gpus_in_the_image(tmp_path: Path) -> None:
    root = in_container(orin_nano(tmp_path, 7), RELEASE)
    write(root, {"usr/local/cuda-13.2/compat_orin/libcuda.so.1": ""})
    assert "cuda-compat" not in checks(root)
    write(root, {"usr/local/cuda-13.2/compat/libcuda.so.595.71.05": ""})
    check = checks(root)["cuda-compat"]
    assert (check.status, check.found) == ("warning", "/usr/local/cuda-13.2/compat has a CUDA driver")
    assert check.advice.startswith("Remove /usr/local/cuda-13.2/compat from the image: it is for discrete GPUs")


@pytest.mark.parametrize(
    ("jetpack", "image", "host", "tag"),
    [
        (5, "r36.4", "L4T 35.4.1, which is older", None),
        (6, "r39.2", "L4T 36.5.2, which is older", "6.2"),
        (7, "r36.4", "L4T 39.2.1", "7.2"),
    ],
)
def test_an_image_for_another_host(tmp_path: Path, jetpack: int, image: str, host: str, tag: str | None) -> None:
    root = in_container(orin_nano(tmp_path, jetpack), RELEASE)
    check = checks(root, {"FEWHEADS_IMAGE_L4T": image})["image"]
    assert (check.status, check.found) == ("failed", f"made for L4T {image[1:]}, the host has {host}")
    build = f"docker build -f jetson.Dockerfile --build-arg JETPACK={tag} -t fewheads:jp{tag} ."
    none = "Update the board to JetPack 6.2 or 7.2."
    assert check.advice == (f"Run fewheads:jp{tag}, or build it: {build}" if tag else none)


@pytest.mark.parametrize(("jetpack", "image", "tag"), [(6, "r39.2", "6.2"), (7, "r36.4", "7.2"), (5, "r36.4", None)])
def test_the_kernel_betrays_another_host(tmp_path: Path, jetpack: int, image: str, tag: str | None) -> None:
    check = checks(in_container(orin_nano(tmp_path, jetpack)), {"FEWHEADS_IMAGE_L4T": image})["image"]
    assert check.status == "failed"
    assert check.advice.startswith(f"Run fewheads:jp{tag}," if tag else "Update the board")


def test_the_image_for_this_host(tmp_path: Path) -> None:
    root = in_container(orin_nano(tmp_path, 6), RELEASE)
    assert checks(root, JP62)["image"] == Check("image", "ok", "made for L4T 36.4, the host has L4T 36.5.2")


@pytest.mark.parametrize(
    ("release", "status", "advice"),
    [
        (
            "R39 (release), REVISION: 2.0",
            "warning",
            "Flash the board again as jetson-orin-nano-devkit-super, then sudo",
        ),
        (
            "R36 (release), REVISION: 4.3",
            "warning",
            "Flash the board again as jetson-orin-nano-devkit-super, then sudo",
        ),
        ("R36 (release), REVISION: 4.2", "absent", "JetPack 6.2 and newer have it."),
        ("R36 (release), REVISION: 3.0", "absent", "JetPack 6.2 and newer have it."),
    ],
)
def test_a_board_without_super_firmware(tmp_path: Path, release: str, status: str, advice: str) -> None:
    root = orin_nano(tmp_path, 7)
    gpu = "sys/class/devfreq/17000000.gpu"
    write(root, {f"{gpu}/available_frequencies": "306000000 624750000\n", RELEASE: f"# {release}, GCID: 1\n"})
    check = checks(root)["super firmware"]
    assert (check.status, check.found) == (status, "no, the GPU is limited to 624.75 MHz")
    assert check.advice.startswith(advice)


@pytest.mark.parametrize(
    ("swaps", "status", "found"),
    [
        (SWAPS, "warning", "none"),
        (None, "warning", "none"),
        (SWAPS + "/swapfile file 8388604 0 -2\n", "ok", "file 8192 MiB"),
        (SWAPS + "/dev/zram0 partition 1024 0 5\n/swapfile file 2048 0 -2\n", "ok", "zram 1 MiB, file 2 MiB"),
        (SWAPS + "/swapfile file N/A 0 -2\n", "warning", "none"),
    ],
)
def test_swap(tmp_path: Path, swaps: str | None, status: str, found: str) -> None:
    root = orin_nano(tmp_path, 6)
    (root / "proc/swaps").unlink()
    if swaps is not None:
        write(root, {"proc/swaps": swaps})
    check = checks(root)["swap"]
    assert (check.status, check.found) == (status, found)
    if status == "warning":
        assert check.advice.startswith("Building an engine may run out of memory. On the board: sudo fallocate -l 8G")


def test_fragmented_memory(tmp_path: Path) -> None:
    root = write(orin_nano(tmp_path, 6), {"proc/buddyinfo": "Node 0, zone Normal 9 9 9 9 9 9 9 9 9 8 0\n"})
    check = checks(root)["largest free blocks"]
    assert (check.status, check.found) == ("warning", "8 of 2048 KiB")
    assert check.advice == "Memory is fragmented: sync && sudo sysctl vm.drop_caches=3, or restart the board."
    write(root, {"proc/buddyinfo": BUDDYINFO})
    assert checks(root)["largest free blocks"].status == "ok"


@pytest.mark.parametrize("contained", [True, False])
def test_devices_that_this_user_may_not_open(contained: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:  # that every user may enter
        os.chmod(directory, 0o755)
        root = write(orin_nano(Path(directory), 6), {"dev/nvmap": ""})
        if contained:
            in_container(root, RELEASE)
        (root / "dev/nvmap").chmod(0o000)
        group = (root / "dev/nvmap").stat().st_gid
        check = as_a_user(lambda: checks(root)["gpu access"])
    assert check.status == "failed"
    assert check.found.endswith("has no access to /dev/nvmap")
    way_out = f"--group-add {group}" if contained else f"sudo usermod -aG {group} USER"
    assert way_out in check.advice


def as_a_user(find: Callable[[], Check]) -> Check:
    """Return what is found without the rights of root, which may open every file."""
    if os.geteuid() != 0:
        return find()
    reader, writer = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        os.setresuid(65534, 65534, 65534)
        os.write(writer, msgspec.json.encode(find()))
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        data = answer.read()
    os.waitpid(process_id, 0)
    return msgspec.json.decode(data, type=Check)


@pytest.mark.skipif(CUDA, reason="this ONNX Runtime has CUDA")
def test_a_jetson_whose_gpu_stays_idle_is_a_warning() -> None:
    found = {check.name: check for check in runtime_checks(on_jetson=False)}
    assert set(found) == {"runtime", *RUNTIMES}
    assert (found["runtime"].status, found["runtime"].advice) == ("ok", "")
    assert (found["onnxruntime-cuda"].status, found["onnxruntime"].found) == ("absent", onnxruntime.__version__)
    (runtime,) = [check for check in runtime_checks(on_jetson=True) if check.name == "runtime"]
    assert runtime.status == "warning"
    assert runtime.found.endswith("runs on the CPU.")
    assert runtime.advice.startswith("The GPU stays idle. Install JetPack's python3-libnvinfer and pycuda, or an ONNX")
