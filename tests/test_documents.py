"""The README and the CHANGELOG tell the truth where a machine can check it."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

from edge import __version__

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == __version__


def test_every_file_that_the_readme_names_exists() -> None:
    tree = README.split("## Tree")[1]
    section = ""
    for line in tree.splitlines():
        folder = re.match(r"^(\w+/)", line)
        if folder:
            section = folder[1]
        for name in re.findall(r"\b([a-z_0-9]+\.(?:py|proto))\b", line):
            found = (ROOT / section / name).exists() or (ROOT / name).exists()
            assert found or list(ROOT.glob(f"{section}**/{name}")), name
    for name in re.findall(r"`((?:edge|export|proto|tests|deploy)/[\w./]*)`", README):
        assert (ROOT / name).exists(), name


def test_every_command_of_the_readme_exists_and_the_other_way_round() -> None:
    table = README.split("## Commands")[1].split("##")[0]
    assert set(re.findall(r"^\| `fewheads (\w+)", table, re.MULTILINE)) == {
        point.name for point in entry_points(group="fewheads.commands")
    }


def test_the_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake (\w+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
