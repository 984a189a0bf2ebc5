"""``fewheads goodput``: responses in time under overload, by tier policy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from edge.cli.options import PATH, cache_option, target_option
from edge.cli.output import json_option, print_fields, print_json, progress
from edge.scheduling.tier_selection import DEADLINE, LOAD, PINNED, POLICIES

_FIELDS = ("policy", "per_second", "in_time", "refused", "late", "p50_ms", "p99_ms", "lag_p99_ms", "tiers")


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=PATH)
@click.option("--factor", type=click.FloatRange(0.1), default=2.0, help="Load, in capacities of the full tier.")
@click.option("--seconds", type=click.FloatRange(min=0.1), default=5.0, help="Length of each burst.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, help="Bursts of each policy.")
@click.option(
    "--deadline-ms", type=click.FloatRange(1), help="Of each request.  [default: 20 times its latency, at least 50]"
)
@click.option("--policy", "policies", multiple=True, type=click.Choice(POLICIES), default=(PINNED, LOAD, DEADLINE))
@target_option
@cache_option
@json_option
def goodput(bundle: Path, factor: float, rounds: int, policies: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Send more requests than the full tier of BUNDLE can answer, and count the responses in time by policy."""
    from edge.bench.open_loop import goodput as measure

    with progress() as bar:
        task = bar.add_task(bundle.name, total=rounds * len(policies), note="")
        options["advanced"] = partial(bar.advance, task)
        report = measure(bundle, policies=policies, factor=factor, rounds=rounds, **options)
    if as_json:
        print_json(report)
        return
    title = (
        f"{report.model}: {report.offered_per_second:.0f} requests/s, {factor:g} times the full tier's "
        f"{report.capacity_per_second:.0f}, within {report.deadline_ms:.0f} ms"
    )
    print_fields(title, _FIELDS, report.bursts)
