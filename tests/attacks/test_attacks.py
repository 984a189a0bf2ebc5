"""Every attack, each on a server of its transport: the server holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.attacks.__main__ import Servers, rows, servers
from tests.attacks.measure import ATTACKS, Attack
from tests.attacks.target import make_home


class Residue(NamedTuple):
    """An attack that a transport does not withstand, with its figure and the issue of the library at fault."""

    figure: str
    issue: str


#: By attack and transport. ``deploy/THREATS.md`` names each.
RESIDUES: dict[tuple[str, str], Residue] = {
    ("unfinished-messages", "grpcio"): Residue("1 GB of messages that gRPC's core buffers", "grpc/grpc#43012"),
    ("unfinished-messages-without-token", "grpcio"): Residue(
        "1 GB of messages that gRPC's core buffers before anyone asks for them", "grpc/grpc#29836"
    ),
    ("large-ids-that-wait", "grpcio"): Residue(
        "1.4 GB and waits of 4 s, because gRPC's core copies all messages at once", "grpc/grpc#10597"
    ),
    ("texts-that-are-too-many", "grpcio"): Residue(
        "0.7 GB and waits of 2 s, because gRPC's core copies all messages at once", "grpc/grpc#10597"
    ),
}


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
