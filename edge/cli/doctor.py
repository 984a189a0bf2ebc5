"""``fewheads doctor``: checks of this machine, with advice for each problem."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal

import click
import msgspec

from edge import __version__
from edge.bundles.bundle import Bundle
from edge.bundles.preprocess import preprocessor
from edge.cli.options import PATH, cache_option, target_option
from edge.cli.output import json_option, print_fields, print_json
from edge.connections.socket_file import SocketFile
from edge.errors import FewheadsError, UsageError
from edge.instruments.board import BoardInfo, Release, parse_release, read_board
from edge.instruments.memory import MemorySampler
from edge.instruments.sensors import read_text
from edge.programs.tier_program import load_tier
from edge.runtimes.cache import cache_directory
from edge.runtimes.runtime import Runtime
from edge.runtimes.table import RUNTIMES, choose

#: Packages of the server. The runtimes check their own packages.
_NEEDED = ("grpcio", "grpcio-health-checking", "grpcio-reflection", "msgspec", "numpy", "prometheus-client", "protobuf")
_IDLE_GPU = (
    "The GPU stays idle. Install JetPack's python3-libnvinfer and pycuda, or an ONNX Runtime with CUDA, such as Jetson "
    "AI Lab's wheel."
)
_LOW_MEMORY_BYTES = 512 * 2**20
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
#: TensorRT asks for so much adjacent memory at once to build some decoders, and boards reserve 256 MiB.
_CONTIGUOUS_BYTES: Final = 272 * 2**20
#: Allocations of 4 GiB and more fail on this release.
_BROKEN_NVMAP: Final = Release(36, 4, 7)
_MIB: Final = 2**20
_SUPPORTED: Final = "Update the board to JetPack 6.2 or 7.2."
_MOUNT: Final = "Start the container with -v /etc/nv_tegra_release:/etc/nv_tegra_release:ro"

CheckStatus = Literal["ok", "absent", "warning", "failed"]


class Check(msgspec.Struct, frozen=True):
    """Result of one check; ``advice`` is empty if the status is ok."""

    name: str
    status: CheckStatus
    found: str
    advice: str = ""


@click.command()
@click.argument("bundles", nargs=-1, type=PATH, metavar="[BUNDLE]...")
@target_option
@cache_option
@json_option
@click.pass_context
def doctor(context: click.Context, bundles: tuple[Path, ...], target: str, cache: Path | None, as_json: bool) -> None:
    """Check what the program needs; exit with 1 if a check fails.

    That is Python, packages, board, container, runtimes, memory, cache, and the ports and sockets of `fewheads serve`.
    Of each BUNDLE, also load every file, and compare it with its golden outputs.
    """
    board = read_board()
    checks = [
        Check("python", "ok", f"{platform.python_version()} on {platform.machine()}"),
        *(installed(name, "failed", f"pip install {name}") for name in _NEEDED),
        installed("torch", "absent", "only to train: pip install 'fewheads[export]'"),
        *jetson_checks(board),
        *runtime_checks(on_jetson=board is not None),
        *_memory(),
        _cache(cache_directory(cache)),
        *places_to_listen(context),
        *(check for path in bundles for check in bundle_checks(path, target, cache)),
    ]
    if as_json:
        print_json({"version": __version__, "checks": checks})
    else:
        print_fields(f"fewheads {__version__}", ("name", "status", "found", "advice"), checks)
    context.exit(int(any(check.status == "failed" for check in checks)))


def runtime_checks(*, on_jetson: bool) -> Iterator[Check]:
    """Yield the version of each runtime, and the choice of ``auto``, which on a Jetson should use the GPU."""
    yield from map(_installed_runtime, RUNTIMES.values())
    try:
        chosen = choose()
    except FewheadsError as error:
        yield Check("runtime", "failed", "", error.fix)
        return
    idle_gpu = on_jetson and chosen.device == "CPU"
    yield Check("runtime", "warning" if idle_gpu else "ok", chosen.reason, _IDLE_GPU if idle_gpu else "")


def _installed_runtime(runtime: type[Runtime]) -> Check:
    try:
        return Check(runtime.name, "ok", runtime.version())
    except FewheadsError as error:
        return Check(runtime.name, "absent", "", error.fix)


def bundle_checks(path: Path, target: str, cache: Path | None) -> Iterator[Check]:
    """Yield a check of each file of a bundle, or of the first tier that cannot be loaded."""
    name = bundle_name = path.absolute().name
    try:
        bundle = Bundle.open(path)
        if preprocessor(bundle):
            yield Check(f"{name} preprocess", "ok", "the golden inputs are reproduced")
        for tier in bundle.manifest.tiers:
            name = f"{bundle_name} {tier.name}"
            with closing(load_tier(bundle, target, cache, tier=tier.name)) as program:
                for role, loaded in program.files.items():
                    golden = f"largest difference {loaded.golden_report.max_abs_diff:.3g}"
                    found = f"{loaded.artifact.file} on {loaded.runtime.name}, {golden} from the golden outputs"
                    yield Check(f"{name} {role}", "ok", found)
    except FewheadsError as error:
        yield Check(name, "failed", f"{error.subject}: {error.given}", error.fix)


def _memory() -> Iterator[Check]:
    for sample in MemorySampler().sample():
        if sample.kind == "system_available":
            low = sample.size_bytes < _LOW_MEMORY_BYTES
            advice = "Stop other programs: loading a model may fail." if low else ""
            yield Check("memory", "warning" if low else "ok", f"{sample.size_bytes / 2**20:.0f} MiB available", advice)


def _cache(cache: Path) -> Check:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return Check("cache", "ok", str(cache))
    except OSError as error:
        advice = "Give a writable --cache or $FEWHEADS_CACHE, in a container a volume; or each start builds again."
        return Check("cache", "failed", str(error), advice)


def places_to_listen(context: click.Context) -> Iterator[Check]:
    """Yield whether a server can listen where ``fewheads serve`` would, by its variables and its file of options."""
    commands = context.find_root().command
    serve = commands.get_command(context, "serve") if isinstance(commands, click.Group) else None
    assert serve
    try:
        options = serve.make_context("serve", []).params
    except (click.UsageError, UsageError) as error:
        found = error.format_message() if isinstance(error, click.UsageError) else str(error)
        yield Check("options", "failed", found, "Correct the variable, or the file that FEWHEADS_SERVE_CONFIG names.")
        return
    for name in ("grpc", "http", "metrics"):
        path, port = options.get(f"{name}_socket"), options[f"{name}_port"]
        if path:
            yield _socket(f"--{name}-socket", path)
        elif port and not (name == "metrics" and options["no_metrics"]):  # port 0 is any free one
            yield _port(f"--{name}-port", options["host"], port)


def _socket(option: str, path: Path) -> Check:
    try:
        SocketFile(option, path).check()
        return Check(f"socket {path}", "ok", "free")
    except UsageError as error:
        return Check(f"socket {path}", "warning", str(error.given), error.fix)


def _port(option: str, host: str, port: int) -> Check:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
        return Check(f"port {port}", "ok", "free")
    except (OSError, OverflowError) as error:  # the latter is of a number that no port has
        return Check(f"port {port}", "warning", str(error), f"Serve on another one with {option}.")


def jetson_checks(
    board: BoardInfo | None, root: Path = Path("/"), environment: Mapping[str, str] = os.environ, driver: str = DRIVER
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
    yield from _contiguous(root)


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


def _jetpack(board: BoardInfo, contained: bool) -> Check:
    name, release = "jetpack", board.release
    if release is None:
        advice = f"{_MOUNT} to see it." if contained else _SUPPORTED
        return Check(name, "absent", f"unknown, L4T {board.l4t or 'unknown'}", advice)
    if board.jetpack is None:
        return Check(name, "warning", f"unknown, L4T {board.l4t}", "Fewheads is made for JetPack 6.2 and 7.2.")
    if release == _BROKEN_NVMAP:
        found, advice = f"{board.jetpack}, L4T {board.l4t}", "The GPU cannot allocate 4 GiB at once; L4T 36.5 can."
        return Check(name, "warning", found, advice)
    good = any(map(release.runs, _IMAGES))
    return Check(name, "ok" if good else "warning", f"{board.jetpack}, L4T {board.l4t}", "" if good else _SUPPORTED)


def _image(board: BoardInfo, image: Release) -> Check:
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


def _power_mode(board: BoardInfo, contained: bool) -> Check:
    if board.power_mode is None:
        mount = "Mount /etc/nvpmodel.conf, /etc/nvpmodel and /var/lib/nvpmodel read-only to see it."
        return Check("power mode", "absent", "unknown", mount if contained else "Set one with sudo nvpmodel -m NUMBER.")
    modes = f", of {', '.join(board.power_modes)}" if board.power_modes else ""
    return Check("power mode", "ok", f"{board.power_mode}{modes}")


def _super_firmware(board: BoardInfo) -> Check:
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


def installed(name: str, otherwise: CheckStatus, advice: str) -> Check:
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


def _contiguous(root: Path) -> Iterator[Check]:
    size = MemorySampler(root).contiguous_bytes()
    if size is not None:
        few = size < _CONTIGUOUS_BYTES
        reserve = "add cma=950M to APPEND in /boot/extlinux/extlinux.conf and restart"
        export = "export them with --layers-per-block 6"
        advice = f"Decoders of many layers may not build: {export}, or {reserve}." if few else ""
        yield Check("contiguous memory", "absent" if few else "ok", f"{size // _MIB} MiB", advice)
