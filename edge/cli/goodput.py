"""``fewheads goodput``: answers in time under overload, by tier policy."""

from __future__ import annotations

from pathlib import Path

import click

from edge.cli.output import json_option, print_json, print_table, progress
from edge.scheduling.tier_selection import DEADLINE, LOAD, PINNED, POLICIES


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--factor",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    help="Load, as a multiple of the full tier's capacity.",
)
@click.option("--seconds", type=click.FloatRange(min=0.1), default=5.0, show_default=True, help="Length of each burst.")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Number of bursts of each policy."
)
@click.option(
    "--deadline-ms", type=click.FloatRange(min=1), help="[default: 20 times the latency of one request, at least 50]"
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(POLICIES),
    default=(PINNED, LOAD, DEADLINE),
    show_default=True,
)
@click.option("--target", default="auto", show_default=True, help="Runtime, as `fewheads build --target`.")
@click.option(
    "--cache", type=click.Path(path_type=Path), help="Directory of built models.  [default: ~/.cache/fewheads]"
)
@json_option
def goodput(
    bundle: Path,
    factor: float,
    seconds: float,
    rounds: int,
    deadline_ms: float | None,
    policies: tuple[str, ...],
    target: str,
    cache: Path | None,
    as_json: bool,
) -> None:
    """Send a BUNDLE with tiers more requests than its full tier can answer, and count the answers in time by policy."""
    from edge.load import goodput as measurement

    with progress() as bar:
        task = bar.add_task(bundle.name, total=rounds * len(policies), note="")
        report = measurement.goodput(
            bundle,
            policies=policies,
            factor=factor,
            seconds=seconds,
            rounds=rounds,
            deadline_ms=deadline_ms,
            target=target,
            cache=cache,
            advanced=lambda: bar.advance(task),
        )
    if as_json:
        print_json(report)
        return
    print_table(
        f"{report.model}: {report.offered_per_second:.0f} requests/s, {factor:g} times the full tier's "
        f"{report.capacity_per_second:.0f}, within {report.deadline_ms:.0f} ms",
        ["policy", "in time per second", "in time", "refused", "late", "p50 ms", "p99 ms", "lag p99 ms", "tiers"],
        [
            [
                burst.policy,
                burst.per_second,
                burst.in_time,
                burst.refused,
                burst.late,
                burst.p50_ms,
                burst.p99_ms,
                burst.lag_p99_ms,
                ", ".join(f"{tier} {count}" for tier, count in sorted(burst.tiers.items())),
            ]
            for burst in report.bursts
        ],
    )
