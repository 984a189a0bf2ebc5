"""Every attack, each on a server of its transport: the server holds."""

import re
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.attacks import content, frames, ports, rest  # noqa: F401 - each adds its attacks
from tests.attacks.measure import ATTACKS, WORST_MS, Attack, Measured, measure, slowness
from tests.attacks.target import NotStarted, Target, make_home

#: A server that has kept this much more memory is replaced, so that each attack meets a fresh one.
MOST_KEPT_MB = 100
_COPIES = "because gRPC's core copies all messages at once"
#: What a transport does not withstand, with its figure and the issue of the library. ``deploy/THREATS.md`` names each.
RESIDUES = {
    ("unfinished-messages", "grpcio"): ("1 GB of messages that gRPC's core buffers", "grpc/grpc#43012"),
    ("unfinished-messages-without-token", "grpcio"): (
        "1 GB of messages that gRPC's core buffers before anyone asks for them", "grpc/grpc#29836"
    ),
    ("large-ids-that-wait", "grpcio"): (f"0.8 GB and waits of 0.6 s, {_COPIES}", "grpc/grpc#10597"),
    ("texts-that-are-too-many", "grpcio"): (f"0.7 GB and waits of 2 s, {_COPIES}", "grpc/grpc#10597"),
}  # fmt: skip


class Servers:
    """One running server at a time, replaced where an attack needs another one, or has harmed it."""

    def __init__(self, home):
        self._home = home
        self._key = None
        self._target = None

    def measure(self, attack, transport):
        """Attack a server; a wait or recovery that is too long counts if one is so twice."""
        result = self._measure(attack, transport)
        if result.problems and all("a wait of" in each or each == "not calm again" for each in result.problems):
            result = self._measure(attack, transport)
        return result

    def _measure(self, attack, transport):
        key = (transport, attack.setup)
        if self._target is None or key != self._key:
            problem = self.stop()
            assert not problem, problem
            try:
                self._target, self._key = Target(self._home, *key), key
            except NotStarted as error:
                return Measured(problems=[f"no start: {error}"])
        result = measure(self._target, attack)
        if result.problems or result.kept_mb > MOST_KEPT_MB:
            result.problems += filter(None, [self.stop()])
        return result

    def stop(self):
        """End the running server, and return what was wrong with its end."""
        problem = self._target.stop() if self._target else ""
        self._target = None
        return problem


@contextmanager
def servers(home):
    """Return the servers, and check the end of the last one."""
    made = Servers(home)
    try:
        yield made
    finally:
        problem = made.stop()
    assert not problem, problem


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with servers(make_home(tmp_path_factory.mktemp("attacks"))) as made:
        yield made


def _parameters():
    """Yield each attack with each of its transports; those that share a server are together."""
    rows = [(transport, attack) for attack in ATTACKS.values() for transport in attack.transports]
    setups = list(dict.fromkeys(attack.setup for attack in ATTACKS.values()))
    for transport, attack in sorted(rows, key=lambda row: (row[0] != "nghttp2", setups.index(row[1].setup))):
        residue = RESIDUES.get((attack.name, transport))
        # It cannot fail, so nobody has to wait for it.
        marks = [pytest.mark.slow, pytest.mark.xfail(strict=False, reason=": ".join(residue))] if residue else []
        yield pytest.param(attack, transport, id=f"{attack.name}-{transport}", marks=marks)


@pytest.mark.parametrize(("attack", "transport"), [*_parameters()])
def test_server_holds(running, attack, transport):
    result = running.measure(attack, transport)
    print(result)
    assert not result.problems


def test_stall_of_the_server_is_noticed(running):
    stall = Attack("stall", lambda target: target.pause(2 * slowness() * WORST_MS / 1000))
    (problem,) = running.measure(stall, "nghttp2").problems
    assert re.fullmatch(r"\w+: a wait of \d+ ms", problem)


def test_threats_name_each_residue():
    page = (Path(__file__).parents[2] / "deploy" / "THREATS.md").read_text()
    _, section = page.split("## What libraries leave open\n")
    named = [line for line in section.splitlines() if line.startswith("- ")]
    assert named == [f"- `{name}` on {over}: {figure} ({issue})." for (name, over), (figure, issue) in RESIDUES.items()]
    assert all(transport in ATTACKS[name].transports for name, transport in RESIDUES)
