"""``fewheads bench``: what serving a bundle costs on this machine, and what becomes of requests that do not wait."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge.cli.connection import connection_options
from edge.cli.load import BenchCommand, is_open, load_options, run_load
from edge.cli.output import json_option, print_json, print_table, progress
from edge.errors import Literally, UsageError

if TYPE_CHECKING:
    from edge.client.connection import Credentials

_DEFAULT_REQUESTS = 2000


@click.command(cls=BenchCommand)
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="BUNDLE...")
@click.option("--url", help="A server that serves them.  [default: one is started on a free port]")
@click.option(
    "--requests",
    type=click.IntRange(min=10),
    help=f"[default: {_DEFAULT_REQUESTS}; in an open loop as many as come in --seconds]",
)
@click.option("--concurrency", type=click.IntRange(min=1, max=256), default=1, show_default=True)
@click.option("--rows", type=click.IntRange(min=1), default=1, show_default=True, help="Batch size of each request.")
@click.option("--target", default="auto", show_default=True, help="Backend, as `fewheads build --target`.")
@click.option("--cache", type=click.Path(path_type=Path), help="Where built models lie.  [default: ~/.cache/fewheads]")
@connection_options
@load_options
@json_option
def bench(
    bundles: tuple[Path, ...],
    url: str | None,
    requests: int | None,
    concurrency: int,
    rows: int,
    target: str,
    cache: Path | None,
    credentials: Credentials | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Time each BUNDLE in process and through a server, in turns, and show the ratio.

    With --rate, ask all of them in an open loop instead: requests come at times that no answer delays, latency counts
    from when each was due, and the report says how every one of them ended.
    """
    if credentials and not url:
        fix = "Leave out TLS and the token: a server that is started for this listens on loopback, for anybody."
        raise UsageError("--url", given=Literally("none, with credentials"), expected="a server to show them", fix=fix)
    if is_open(click.get_current_context()):
        run_load(
            bundles,
            url=url,
            requests=requests,
            rows=rows,
            target=target,
            cache=cache,
            credentials=credentials,
            as_json=as_json,
            **options,
        )
        return
    from edge.load import bench as benchmark

    requests = requests or _DEFAULT_REQUESTS
    reports = []
    with progress() as bar:
        for path in bundles:
            task = bar.add_task(path.name, total=5, note="")
            reports.append(
                benchmark.bench(
                    path,
                    url=url,
                    requests=requests,
                    concurrency=concurrency,
                    rows=rows,
                    target=target,
                    cache=cache,
                    credentials=credentials,
                    advanced=lambda task=task: bar.advance(task),  # type: ignore[misc]
                )
            )
    if as_json:
        print_json(reports)
        return
    print_table(
        f"{requests} requests of {rows} row(s), {concurrency} client(s)",
        ["model", "where", "p50 ms", "p95 ms", "p99 ms", "per second", "ratio"],
        [
            [report.model, where, latency.p50_ms, latency.p95_ms, latency.p99_ms, latency.per_second, ratio]
            for report in reports
            for where, latency, ratio in (
                ("in process", report.in_process, 1.0),
                ("served", report.served, report.overhead_ratio),
            )
        ],
    )
