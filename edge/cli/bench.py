"""``fewheads bench``: what serving a bundle costs on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from edge.cli.output import json_option, print_json, print_table, progress


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="BUNDLE...")
@click.option("--url", help="A server that serves them.  [default: one is started on a free port]")
@click.option("--requests", type=click.IntRange(min=10), default=2000, show_default=True)
@click.option("--concurrency", type=click.IntRange(min=1, max=256), default=1, show_default=True)
@click.option("--rows", type=click.IntRange(min=1), default=1, show_default=True, help="Batch size of each request.")
@click.option("--target", default="auto", show_default=True, help="Backend, as `fewheads build --target`.")
@click.option("--cache", type=click.Path(path_type=Path), help="Where built models lie.  [default: ~/.cache/fewheads]")
@json_option
def bench(
    bundles: tuple[Path, ...],
    url: str | None,
    requests: int,
    concurrency: int,
    rows: int,
    target: str,
    cache: Path | None,
    as_json: bool,
) -> None:
    """Time each BUNDLE in process and through a server, in turns, and show the ratio."""
    from edge import bench as benchmark

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
