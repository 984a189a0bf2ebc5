"""Facts about a Jetson, from the files of an Orin Nano, of a container on it, and from broken files."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.instruments.board import Board, Release, parse_release, read_board
from tests.support import boards
from tests.support.boards import KERNELS, MODELS, RELEASES, in_container, link, orin_nano, write

JETPACKS = {5: ("35.4.1", "5.1.2"), 6: ("36.5.2", "6.2.2"), 7: ("39.2.1", "7.2.1")}


def board(root: Path) -> Board:
    found = read_board(root)
    assert found
    return found


@pytest.mark.parametrize("jetpack", JETPACKS)
def test_facts_of_an_orin_nano(tmp_path: Path, jetpack: int) -> None:
    l4t, name = JETPACKS[jetpack]
    root = orin_nano(tmp_path, jetpack)
    assert read_board(root) == Board(
        model=MODELS[jetpack],
        soc="tegra234",
        l4t=l4t,
        jetpack=name,
        power_mode=boards.POWER_MODES[jetpack][boards.POWER_MODE[jetpack]],
        power_modes=tuple(boards.POWER_MODES[jetpack]),
        super_firmware=jetpack != 5,
        kernel=KERNELS[jetpack],
    )
    assert read_board(in_container(root)) == Board("NVIDIA Jetson", kernel=KERNELS[jetpack])


@pytest.mark.parametrize(
    "files",
    [{}, {"proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0"}, {"etc/nvpmodel.conf": "< POWER_MODEL"}],
)
def test_other_machines_are_no_board(tmp_path: Path, files: dict[str, str]) -> None:
    files = {"proc/sys/kernel/osrelease": "6.8.0-60-generic\n", **files}
    assert read_board(write(tmp_path, files)) is None


@pytest.mark.parametrize(
    ("line", "release", "jetpack"),
    [
        ("# R36 (release), REVISION: 4.0, GCID: 1, BOARD: generic", Release(36, 4, 0), "6.1"),
        ("# R40 (release), REVISION: 1.0, GCID: 1, BOARD: generic", Release(40, 1, 0), None),
        ("# R36 (release), REVISION: 3, GCID: 1, BOARD: generic", Release(36, 3), "6.0"),
        ("r36.4", Release(36, 4), None),  # two JetPacks have it
        ("39.2.1", Release(39, 2, 1), "7.2.1"),
    ],
)
def test_releases(line: str, release: Release, jetpack: str | None) -> None:
    assert parse_release(line) == release
    assert release.jetpack == jetpack


@pytest.mark.parametrize("text", ["", "# R36", "R (release), REVISION: .", "latest", "36", "r36.x", "٣٦.٤", "N/A"])
def test_other_text_is_not_a_release(tmp_path: Path, text: str) -> None:
    assert parse_release(text) is None
    found = board(write(tmp_path, {"etc/nv_tegra_release": f"{text}\n"}))
    assert (found.l4t, found.jetpack) == (text.strip("# ") or None, None)


def test_board_runs_images_of_its_release_or_else_of_its_kernel() -> None:
    for host, image, runs in (
        ("36.4.3", Release(36, 4), True),
        ("36.5.2", Release(36, 4), True),
        ("36.3.0", Release(36, 4), False),
        ("39.2.1", Release(36, 4), False),
        ("36.4.3", Release(39, 2), False),
    ):
        assert Board("NVIDIA Jetson", l4t=host).runs(image) is runs
    for kernel, r36, r39 in (
        ("5.10.120-tegra", False, False),
        ("5.15.148-tegra", None, False),
        ("6.8.12-1021-tegra", False, None),
        (None, None, None),
    ):
        found = Board("NVIDIA Jetson", kernel=kernel)
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
def test_power_mode(tmp_path: Path, status: str | None, config: str | None, mode: str | None) -> None:
    files = {"etc/nv_tegra_release": RELEASES[6], "var/lib/nvpmodel/status": status, "etc/nvpmodel.conf": config}
    assert board(write(tmp_path, {path: text for path, text in files.items() if text is not None})).power_mode == mode


@pytest.mark.parametrize(
    ("limit", "firmware"), [("624750000", False), ("612000000", True), ("918000000", True), ("N/A", True)]
)
def test_firmware_by_the_clocks(tmp_path: Path, limit: str, firmware: bool) -> None:
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


def test_broken_files_give_no_facts(tmp_path: Path) -> None:
    root = orin_nano(tmp_path, 6)
    for path in ("proc/device-tree/model", "proc/device-tree/compatible", "var/lib/nvpmodel/status"):
        (root / path).write_bytes(b"\xff\xfe\0Jetson\n\x1b[31m" * 40)
    (root / "etc/nvpmodel.conf").unlink()
    link(root / "etc/nvpmodel.conf", "nvpmodel.conf")
    (root / "etc/nv_tegra_release").unlink()
    (root / "etc/nv_tegra_release").mkdir()
    found = board(root)
    assert (found.model, found.l4t, found.power_mode, found.power_modes) == ("NVIDIA Jetson", None, None, ())
