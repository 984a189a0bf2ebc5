"""Model, SoC, software release, power mode and firmware of a Jetson, read from files without running programs.

In a container ``/proc/device-tree`` is masked. The kernel's release still identifies a Jetson; the other facts need
mounts of ``/etc/nv_tegra_release``, ``/etc/nvpmodel.conf``, ``/etc/nvpmodel``, ``/var/lib/nvpmodel`` and
``/etc/nv_boot_control.conf``. A fact that cannot be read is None.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from edge.instruments.sensors import gpu_devices, read_name, read_text, whole

_MODELS: Final = ("proc/device-tree/model", "sys/devices/soc0/machine", "tmp/nv_jetson_model")
_ANY_MODEL: Final = "NVIDIA Jetson"
_RELEASE: Final = "etc/nv_tegra_release"
_LONGEST_LINE: Final = 256
_LONGEST_FILE: Final = 256 * 1024
_RELEASE_LINE: Final = re.compile(r"R(\d+)\s*\(release\),\s*REVISION:\s*(\d+)(?:\.(\d+))?", re.ASCII)
_RELEASE_NUMBER: Final = re.compile(r"[rR]?(\d+)\.(\d+)(?:\.(\d+))?", re.ASCII)
_POWER_MODEL: Final = re.compile(r"^\s*<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>", re.MULTILINE | re.ASCII)
#: The first L4T release of each JetPack, which later patches of the same major and minor number belong to.
_JETPACKS: Final = {
    (35, 1, 0): "5.0.2",
    (35, 2, 1): "5.1",
    (35, 3, 1): "5.1.1",
    (35, 4, 1): "5.1.2",
    (35, 5, 0): "5.1.3",
    (36, 3, 0): "6.0",
    (36, 4, 0): "6.1",
    (36, 4, 3): "6.2",
    (36, 4, 4): "6.2.1",
    (36, 5, 0): "6.2.2",
    (38, 2, 0): "7.0",
    (38, 4, 0): "7.1",
    (39, 1, 0): "7.2",
    (39, 2, 0): "7.2",
    (39, 2, 1): "7.2.1",
}
#: Major and minor number of the kernel to the major numbers of L4T that ship it.
_KERNELS: Final = {"5.10": (35,), "5.15": (36,), "6.8": (38, 39)}
#: The modules of the Orin Nano, by part number.
_ORIN_NANO: Final = ("p3767-0003", "p3767-0004", "p3767-0005")
#: The maximum GPU clock of an Orin Nano without Super firmware. No mode of Super firmware has this one.
_GPU_WITHOUT_SUPER_HERTZ: Final = 624_750_000


class Release(NamedTuple):
    """A release of L4T; ``patch`` is None where only major and minor number are known."""

    major: int
    minor: int
    patch: int | None = None

    def __str__(self) -> str:
        return ".".join(str(number) for number in self if number is not None)

    @property
    def jetpack(self) -> str | None:
        """The JetPack of this release, or of the patch before it; None for an unknown major or minor number."""
        names = {patch: name for (*family, patch), name in _JETPACKS.items() if tuple(family) == self[:2]}
        if self.patch is None:
            return next(iter(names.values())) if len(names) == 1 else None
        return names.get(max((patch for patch in names if patch <= self.patch), default=-1))

    def runs(self, image: Release) -> bool:
        """Return whether a host of this release runs images of another one: same major, and r36.3 is not r36.4."""
        if self.major != image.major:
            return False
        return self.major != 36 or (self.minor >= 4) == (image.minor >= 4)


class BoardInfo(msgspec.Struct, frozen=True):
    """A Jetson. A fact that cannot be read is None."""

    model: str  # in the device tree, or NVIDIA Jetson where that is masked
    soc: str | None = None  # such as tegra234
    l4t: str | None = None  # the release such as 36.4.3, or the text of the file where it is not a release
    jetpack: str | None = None  # such as 6.2; None for an unknown release
    power_mode: str | None = None  # nvpmodel's such as MAXN_SUPER, or mode 2 where the names are missing
    power_modes: tuple[str, ...] = ()  # the names of all modes
    super_firmware: bool | None = None  # whether the firmware of an Orin Nano has the Super clocks
    kernel: str | None = None  # its release

    @property
    def release(self) -> Release | None:
        """The release as numbers."""
        return parse_release(self.l4t or "")

    def runs(self, image: Release) -> bool | None:
        """Return whether the board runs images of a release; None where that is unknown."""
        if self.release:
            return self.release.runs(image)
        majors = _KERNELS.get(".".join((self.kernel or "").split(".")[:2]))
        return False if majors and image.major not in majors else None


def read_board(root: Path = Path("/")) -> BoardInfo | None:
    """Return the facts about this machine; None if it is not a Jetson."""
    compatible = read_text(root / "proc/device-tree/compatible", _LONGEST_LINE).split("\0")
    kernel = read_name(root / "proc/sys/kernel/osrelease")
    l4t = next(iter(read_text(root / _RELEASE, _LONGEST_FILE).splitlines()), "").strip("# ")
    models = (read_name(root / path, _LONGEST_LINE) for path in _MODELS)
    model = next((model for model in models if "jetson" in model.lower()), "")
    if not model:
        if not (root / _RELEASE).is_file() and not kernel.endswith("-tegra"):
            return None
        model = _ANY_MODEL
    release = parse_release(l4t)
    modes = _power_modes(root)
    return BoardInfo(
        model=model,
        soc=next((name.removeprefix("nvidia,") for name in compatible if name.startswith("nvidia,tegra")), None),
        l4t=str(release) if release else l4t or None,
        jetpack=release.jetpack if release else None,
        power_mode=_power_mode(root, modes),
        power_modes=tuple(modes.values()),
        super_firmware=_super_firmware(root, model, compatible, modes),
        kernel=kernel or None,
    )


def parse_release(text: str) -> Release | None:
    """Return the release of L4T in a line of ``/etc/nv_tegra_release``, or in ``36.4.3``, ``36.4`` or ``r36.4``."""
    match = _RELEASE_LINE.search(text) or _RELEASE_NUMBER.fullmatch(text.strip())
    return Release(*(int(number) if number else None for number in match.groups())) if match else None  # type: ignore[arg-type]


def _power_modes(root: Path) -> dict[int, str]:
    return {
        int(number): name
        for number, name in _POWER_MODEL.findall(read_text(root / "etc/nvpmodel.conf", _LONGEST_FILE))
        if name.isprintable()
    }


def _power_mode(root: Path, modes: dict[int, str]) -> str | None:
    mode = re.search(r"\bpmode:(\d+)", read_text(root / "var/lib/nvpmodel/status", _LONGEST_LINE), re.ASCII)
    return modes.get(int(mode[1]), f"mode {int(mode[1])}") if mode else None


def _super_firmware(root: Path, model: str, compatible: list[str], modes: dict[int, str]) -> bool | None:
    """Decide by the GPU's clocks, else by the power modes, else by the names of model and board."""
    if "orin nano" not in model.lower() and not any(part in name for name in compatible for part in _ORIN_NANO):
        return None
    for device in gpu_devices(root):
        clocks = read_text(device / "available_frequencies", _LONGEST_FILE).split()
        fastest = max((clock for clock in map(whole, clocks) if clock), default=None)
        if fastest is not None:
            return fastest > _GPU_WITHOUT_SUPER_HERTZ
        limit = whole(read_text(device / "max_freq"))
        if limit is not None and limit >= _GPU_WITHOUT_SUPER_HERTZ:  # a lower one is a power mode's
            return limit > _GPU_WITHOUT_SUPER_HERTZ
    if modes:
        return any("SUPER" in name for name in modes.values())
    named = [model.lower(), *compatible, read_text(root / "etc/nv_boot_control.conf", _LONGEST_FILE).lower()]
    return True if any(re.search(r"\bsuper\b", name) for name in named) else None
