"""Attacks a server of each transport, and prints what a well-behaved client beside each attack notices."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click
import msgspec

from edge.settings import TRANSPORTS
from tests.attacks import content, frames, ports, rest  # noqa: F401 - each adds its attacks
from tests.attacks.measure import ATTACKS, Attack, Measured, measure
from tests.attacks.target import Home, NotStarted, Setup, Target, make_home

#: A server that has kept this much more memory is replaced, so that each attack meets a fresh one.
_MOST_KEPT_MB = 100


class Servers:
    """One running server at a time, replaced where an attack needs another one, or has harmed it."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._key: tuple[str, Setup] | None = None
        self._target: Target | None = None

    def measure(self, attack: Attack, transport: str) -> Measured:
        """Attack a server; a wait that is too long counts if it is so twice."""
        result = self._measure(attack, transport)
        if len(result.problems) == 1 and "a wait of" in result.problems[0]:
            result = self._measure(attack, transport)
        return result

    def _measure(self, attack: Attack, transport: str) -> Measured:
        try:
            target = self._target_of(attack, transport)
        except NotStarted as error:
            return Measured(attack.name, transport, problems=[f"no start: {error}"])
        result = measure(target, attack)
        if result.problems or result.kept_mb > _MOST_KEPT_MB:
            result.problems += filter(None, [self.stop()])
        return result

    def _target_of(self, attack: Attack, transport: str) -> Target:
        key = (transport, attack.setup)
        if self._target is None or key != self._key:
            problem = self.stop()
            assert not problem, problem
            self._target = Target(self._home, *key)
            self._key = key
        return self._target

    def stop(self) -> str:
        """End the running server, and return what was wrong with its end."""
        problem = self._target.stop() if self._target else ""
        self._target, self._key = None, None
        return problem


@contextmanager
def servers(home: Home) -> Iterator[Servers]:
    """Return the servers, and check the end of the last one."""
    made = Servers(home)
    try:
        yield made
    finally:
        problem = made.stop()
    assert not problem, problem


def rows() -> list[tuple[str, Attack]]:
    """Return each attack with each of its transports; those that share a server are together."""
    found = [(transport, attack) for attack in ATTACKS.values() for transport in attack.transports]
    setups = list(dict.fromkeys(attack.setup for attack in ATTACKS.values()))
    return sorted(found, key=lambda row: (row[0] != "nghttp2", setups.index(row[1].setup)))


_COLUMNS = ("attack", "transport", "worst ms", "median ms", "RSS MB", "log MB", "recovery s", "seconds", "verdict")


def _row(one: Measured) -> str:
    numbers = f"{one.worst_ms:.0f}", f"{one.median_ms:.1f}", f"{one.rss_mb:.0f}", f"{one.log_mb:.1f}"
    times = f"{one.recovery_s:.1f}", f"{one.seconds:.1f}"
    return f"| {' | '.join((one.attack, one.transport, *numbers, *times, one.verdict))} |"


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(sorted(ATTACKS)))
@click.option("--transport", "transports", type=click.Choice(TRANSPORTS), multiple=True, default=TRANSPORTS)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the measurements here, too.")
def main(names: tuple[str, ...], transports: tuple[str, ...], json_file: Path | None) -> None:
    """Run the attacks with these NAMES, or all."""
    found: list[Measured] = []
    started = time.monotonic()
    click.echo(f"| {' | '.join(_COLUMNS)} |\n|{' --- |' * len(_COLUMNS)}")
    with tempfile.TemporaryDirectory() as directory, servers(make_home(Path(directory))) as running:
        for transport, attack in rows():
            if transport in transports and (not names or attack.name in names):
                found.append(running.measure(attack, transport))
                click.echo(_row(found[-1]))
    click.echo(f"{len(found)} attacks in {time.monotonic() - started:.0f} s")
    if json_file:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode([asdict(one) for one in found])))


if __name__ == "__main__":
    main()
