"""Every attack, each on a server of its transport: the server holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.measure import ATTACKS, Attack
from tests.attacks.residues import RESIDUES
from tests.attacks.table import Servers, rows, servers
from tests.attacks.target import make_home


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with servers(make_home(tmp_path_factory.mktemp("attacks"))) as made:
        yield made


def _parameters() -> Iterator[object]:
    for transport, attack in rows():
        residue = RESIDUES.get((attack.name, transport))
        marks = [pytest.mark.xfail(strict=False, reason=f"{residue.figure}: {residue.issue}")] if residue else []
        yield pytest.param(attack, transport, id=f"{attack.name}-{transport}", marks=marks)


@pytest.mark.parametrize(("attack", "transport"), [*_parameters()])
def test_server_holds(running: Servers, attack: Attack, transport: str) -> None:
    result = running.measure(attack, transport)
    assert not result.problems, result


def test_threats_name_each_residue() -> None:
    page = (Path(__file__).parents[2] / "deploy" / "THREATS.md").read_text()
    _, section = page.split("## What libraries leave open\n")
    named = [line for line in section.splitlines() if line.startswith("- ")]
    expected = RESIDUES.items()
    assert named == [
        f"- `{name}` on {transport}: {each.figure} ({each.issue})." for (name, transport), each in expected
    ]
    assert all(transport in ATTACKS[name].transports for name, transport in RESIDUES)
