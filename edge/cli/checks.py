"""Checks of a Jetson for ``fewheads doctor``: software, power, memory, GPU and container."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal

import msgspec

from edge.instruments.board import Board, Release, parse_release
from edge.instruments.memory import MemorySampler
from edge.instruments.sensors import read_text

DRIVER: Final = "libcuda.so.1"
#: Variable of our images with their release of L4T, such as r36.4.
IMAGE: Final = "FEWHEADS_IMAGE_L4T"
_SIGNS_OF_A_CONTAINER: Final = (".dockerenv", "run/.containerenv")
_CONTAINER_VARIABLES: Final = (IMAGE, "KUBERNETES_SERVICE_HOST")
#: JetPack of each of our images, by its release of L4T.
_IMAGES: Final = {Release(36, 4): "6.2", Release(39, 2): "7.2"}
_FIRST_SUPER: Final = Release(36, 4, 3)
_CAPABILITIES: Final = "NVIDIA_DRIVER_CAPABILITIES"
_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
#: Some releases of NVIDIA's container runtime fail on these on a Jetson.
_BROKEN_CAPABILITIES: Final = ("all", "graphics", "display")
_DEVICE_FILES: Final = ("dev/nvmap", "dev/nvgpu/igpu0/ctrl", "dev/nvhost-ctrl-gpu")
#: Typical memory in free blocks of the largest size after some uptime; less shows fragmentation.
_FRAGMENTED_BYTES: Final = 32 * 2**20
_MIB: Final = 2**20
_SUPPORTED: Final = "Update the board to JetPack 6.2 or 7.2."
_MOUNT: Final = "Start the container with -v /etc/nv_tegra_release:/etc/nv_tegra_release:ro"

Status = Literal["ok", "absent", "warning", "failed"]


class Check(msgspec.Struct, frozen=True):
    """Result of one check; ``advice`` is empty if the status is ok."""

    name: str
    status: Status
    found: str
    advice: str = ""


def jetson_checks(
    board: Board | None, root: Path = Path("/"), environment: Mapping[str, str] = os.environ, driver: str = DRIVER
) -> Iterator[Check]:
    """Yield the checks of a Jetson; on another machine, where ``board`` is None, only whether its image expects one.

    ``environment`` shows how a container was started; ``root`` and ``driver`` are others in tests.
    """
    image = parse_release(environment.get(IMAGE, ""))
    if board is None:
        yield Check("jetson", "ok", "no")
        if image:
            advice = "Run the image on a Jetson; elsewhere install the package."
            yield Check("image", "failed", f"made for L4T {image}, and this machine is not a Jetson", advice)
        return
    contained = any((root / sign).exists() for sign in _SIGNS_OF_A_CONTAINER)
    contained = contained or any(environment.get(variable) for variable in _CONTAINER_VARIABLES)
    yield Check("jetson", "ok", board.model if board.soc is None else f"{board.model}, {board.soc}")
    yield _jetpack(board, contained)
    if image:
        yield _image(board, image)
    yield _power_mode(board, contained)
    if board.super_firmware is not None:
        yield _super_firmware(board)
    yield _driver(driver, image is not None, contained, environment)
    if contained:
        yield from _container(root, environment)
    yield from _device_files(root, contained)
    yield installed("pycuda", "absent", "TensorRT needs it: pip install pycuda, which compiles with nvcc and g++.")
    yield _swap(root)
    yield from _free_blocks(root)


def driver_version(driver: str = DRIVER) -> str:
    """Return the newest CUDA that the driver supports, such as ``12.6``, or raise an OSError."""
    number = ctypes.c_int()
    try:
        error = ctypes.CDLL(driver).cuDriverGetVersion(ctypes.byref(number))
    except AttributeError as missing:
        raise OSError(f"{driver} is not a CUDA driver: {missing}") from None
    if error:
        raise OSError(f"{driver} returns CUDA error {error}")
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _jetpack(board: Board, contained: bool) -> Check:
    name, release = "jetpack", board.release
    if release is None:
        advice = f"{_MOUNT} to see it." if contained else _SUPPORTED
        return Check(name, "absent", f"unknown, L4T {board.l4t or 'unknown'}", advice)
    if board.jetpack is None:
        return Check(name, "warning", f"unknown, L4T {board.l4t}", "Fewheads is made for JetPack 6.2 and 7.2.")
    good = any(map(release.runs, _IMAGES))
    return Check(name, "ok" if good else "warning", f"{board.jetpack}, L4T {board.l4t}", "" if good else _SUPPORTED)


def _image(board: Board, image: Release) -> Check:
    runs = board.runs(image)
    host = f"L4T {board.l4t}" if board.l4t else f"kernel {board.kernel}"
    if board.release and board.release[:2] < image[:2]:
        host += ", which is older"
    found = f"made for L4T {image}, the host has {host}"
    if runs is None:
        return Check("image", "warning", found, f"{_MOUNT}, so that it can be compared.")
    if runs:
        return Check("image", "ok", found)
    # Without a release, the kernel can only rule images out.
    fitting = [name for fits in (True, None) for release, name in _IMAGES.items() if board.runs(release) is fits]
    jetpack = fitting[0] if fitting else ""
    build = f"docker build -f jetson.Dockerfile --build-arg JETPACK={jetpack} -t fewheads:jp{jetpack} ."
    advice = f"Run fewheads:jp{jetpack}, or build it: {build}" if jetpack else _SUPPORTED
    return Check("image", "failed", found, advice)


def _power_mode(board: Board, contained: bool) -> Check:
    if board.power_mode is None:
        mount = "Mount /etc/nvpmodel.conf, /etc/nvpmodel and /var/lib/nvpmodel read-only to see it."
        return Check("power mode", "absent", "unknown", mount if contained else "Set one with sudo nvpmodel -m NUMBER.")
    modes = f", of {', '.join(board.power_modes)}" if board.power_modes else ""
    return Check("power mode", "ok", f"{board.power_mode}{modes}")


def _super_firmware(board: Board) -> Check:
    name, release = "super firmware", board.release
    if board.super_firmware:
        return Check(name, "ok", "yes")
    found = "no, the GPU is limited to 624.75 MHz"
    if release and (release.major, release.minor, release.patch or 0) < _FIRST_SUPER:
        return Check(name, "absent", found, "JetPack 6.2 and newer have it.")
    flash = "Flash the board again as jetson-orin-nano-devkit-super, then sudo nvpmodel -m 2."
    return Check(name, "warning", found, f"{flash} JetPack 7.2's installer leaves it out, 7.2.1's does not.")


def _driver(driver: str, image: bool, contained: bool, environment: Mapping[str, str]) -> Check:
    try:
        return Check("cuda driver", "ok", f"CUDA {driver_version(driver)}")
    except OSError as error:
        advice = _without_driver(contained, environment)
        return Check("cuda driver", "failed" if image else "warning", str(error), advice)


def _without_driver(contained: bool, environment: Mapping[str, str]) -> str:
    if not contained:
        return "Install JetPack's driver: sudo apt install nvidia-jetpack."
    if environment.get(_DEVICES, "all") in ("", "none", "void"):
        return f"Start the container with -e {_DEVICES}=all and --runtime nvidia."
    capabilities = environment.get(_CAPABILITIES)
    if capabilities and not {"compute", "all"} & set(capabilities.split(",")):
        return f"Start the container with -e {_CAPABILITIES}=compute,utility."
    default = '"default-runtime": "nvidia" in /etc/docker/daemon.json'
    missing = "If Docker has no such runtime, install nvidia-container-toolkit."
    return f"Start the container with --runtime nvidia, or set {default} and restart Docker. {missing}"


def _container(root: Path, environment: Mapping[str, str]) -> Iterator[Check]:
    name = "container"
    capabilities = environment.get(_CAPABILITIES, "").split(",")
    broken = [each for each in capabilities if each in _BROKEN_CAPABILITIES]
    if broken:
        advice = f"Set {_CAPABILITIES}=compute,utility: some releases of NVIDIA's runtime fail on {broken[0]}."
        yield Check(name, "warning", f"{_CAPABILITIES}={environment[_CAPABILITIES]}", advice)
    else:
        yield Check(name, "ok", "yes")
    compat = sorted(root.glob("usr/local/cuda*/compat/libcuda.so*"))
    if compat:
        directory = f"/{compat[0].parent.relative_to(root)}"
        advice = f"Remove {directory} from the image: it is for discrete GPUs, and hides the driver of the Jetson."
        yield Check("cuda-compat", "warning", f"{directory} has a CUDA driver", advice)


def _device_files(root: Path, contained: bool) -> Iterator[Check]:
    for file in _DEVICE_FILES:
        path = root / file
        if path.exists() and not os.access(path, os.R_OK | os.W_OK):
            group = path.stat().st_gid
            join = f"Let this user join group {group}: sudo usermod -aG {group} USER."
            advice = f"Start the container with --group-add {group}." if contained else join
            yield Check("gpu access", "failed", f"user {os.geteuid()} has no access to /{file}", advice)
            return


def installed(name: str, otherwise: Status, advice: str) -> Check:
    """Return the check of a package, with a status and advice if it is missing."""
    try:
        return Check(name, "ok", version(name))
    except PackageNotFoundError:
        return Check(name, otherwise, "", advice)


def _swap(root: Path) -> Check:
    sizes: dict[str, int] = {}
    for line in read_text(root / "proc/swaps", _MIB).splitlines()[1:]:
        words = line.split()
        if len(words) >= 3 and words[2].isdecimal():
            kind = "zram" if "zram" in words[0] else words[1]
            sizes[kind] = sizes.get(kind, 0) + int(words[2]) * 1024
    if sizes:
        return Check("swap", "ok", ", ".join(f"{kind} {size / _MIB:.0f} MiB" for kind, size in sizes.items()))
    file = "/swapfile"
    make = f"sudo fallocate -l 8G {file} && sudo chmod 600 {file} && sudo mkswap {file} && sudo swapon {file}"
    return Check("swap", "warning", "none", f"Building an engine may run out of memory. On the board: {make}")


def _free_blocks(root: Path) -> Iterator[Check]:
    sizes = {reading.kind: reading.size_bytes for reading in MemorySampler(root).sample()}
    size, total = sizes.get("largest_free_block"), sizes.get("largest_free_blocks_total")
    if size and total:
        few = total < _FRAGMENTED_BYTES
        advice = "Memory is fragmented: sync && sudo sysctl vm.drop_caches=3, or restart the board." if few else ""
        found = f"{total // size} of {size / 2**10:.0f} KiB"
        yield Check("largest free blocks", "warning" if few else "ok", found, advice)
