"""Attacks a server of each transport, and prints what a well-behaved client beside each attack notices."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import click
import msgspec

from edge.settings import TRANSPORTS
from tests.attacks.measure import ATTACKS, Measured
from tests.attacks.table import rows, servers
from tests.attacks.target import make_home

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
