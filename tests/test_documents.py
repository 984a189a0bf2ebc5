"""The README and the CHANGELOG tell the truth where a machine can check it."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

from deploy import device_table
from edge import __version__
from export.reduction.plan import amdahl_bound, macs_per_token
from export.transformer import LayerShape
from tests.support.imports import ORDER

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SERVER = (ROOT / "edge" / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
OTHERS = "".join(
    (ROOT / name).read_text() for name in ("deploy/README.md", "deploy/JETSON.md", "edge/bundles/FORMAT.md")
)


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
    for name in re.findall(r"`((?:edge|export|proto|tests|deploy)/[\w./]*)`", README + SERVER + CONTRIBUTING + OTHERS):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\btests/[\w/]+\.py\b", README + SERVER + CONTRIBUTING + OTHERS):
        assert (ROOT / name).exists(), name
    for page, folder in ((README, ROOT), (SERVER, ROOT / "edge"), (CONTRIBUTING, ROOT)):
        for target in re.findall(r"\]\(([\w./-]+?)(?:#[\w-]*)?\)", page):
            assert (folder / target).exists(), target


def test_every_command_of_the_readme_exists_and_the_other_way_round() -> None:
    table = README.split("## Commands")[1].split("##")[0]
    assert set(re.findall(r"^\| `fewheads (\w+)", table, re.MULTILINE)) == {
        point.name for point in entry_points(group="fewheads.commands")
    }


def test_the_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([\w-]+)", README + SERVER + CONTRIBUTING):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_map_for_contributors_is_in_the_order_of_the_layers() -> None:
    tables = CONTRIBUTING.split("| package of `edge/` |")[1].split("| package of `export/` |")
    first = [row.split("|")[1] for table in tables for row in table.split("\n\n")[0].splitlines()[2:]]
    named = [name.removesuffix(".py") for cell in first for name in re.findall(r"`(\w+(?:\.py)?)/?`", cell)]
    order = [name for name in ORDER if name != "__main__"]
    assert named[: len(order)] == order
    packages = {path.parent.name for path in (ROOT / "export").glob("*/__init__.py")}
    assert set(named[len(order) :]) == packages


def test_the_tables_of_boards_are_made_from_their_records() -> None:
    records = map(device_table.read_record, sorted((ROOT / "deploy" / "device_records").glob("*.json")))
    table = SERVER.split(device_table.BEGIN)[1].split(device_table.END)[0]
    assert table.strip() == device_table.markdown(list(records))


def test_the_limits_page_computes_what_it_says() -> None:
    page = (ROOT / "export" / "reduction" / "LIMITS.md").read_text()
    d, lengths = 768, (128, 384, 512, 2048)
    layer = LayerShape(12, 64, 3072)
    parts = {
        "35 %": lambda n: 0.35 * n * d,
        "all logits": lambda n: n * d,
        "logits and weighted": lambda n: 2 * n * d,
        "logits with": lambda n: n * d + 2 * d * d,
        "the whole": lambda n: 2 * n * d + 4 * d * d,
    }
    for name, part in parts.items():
        (row,) = re.findall(rf"^\| {name}.*$", page, re.MULTILINE)
        bounds = [amdahl_bound(part(n) / macs_per_token(d, layer, n)) for n in lengths]
        assert re.findall(r"\d\.\d{3}", row) == [f"{bound:.3f}" for bound in bounds]
    for heads, width, units in ((12, 32, 3072), (8, 64, 2048), (6, 64, 1536), (3, 64, 768)):
        (row,) = re.findall(rf"^\| {heads} heads of {width}, {units:,} units.*$", page, re.MULTILINE)
        smaller = LayerShape(heads, width, units)
        ratios = [macs_per_token(d, layer, n) / macs_per_token(d, smaller, n) for n in (128, 512)]
        assert re.findall(r"\d\.\d{2}", row) == [f"{ratio:.2f}" for ratio in ratios]
