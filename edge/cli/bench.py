"""``fewheads bench``: latency of bundles in process and served, an open loop of requests, and records of a board."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge.cli.connection import connection_options
from edge.cli.load import BenchCommand, is_open, load_options, run_load
from edge.cli.on_device import DEVICE_OPTIONS, check_options, device_options, run_on_device
from edge.cli.output import json_option, print_json, print_table, progress
from edge.errors import Literally, UsageError

if TYPE_CHECKING:
    from edge.client.connection import Credentials

_DEFAULT_REQUESTS = 2000


@click.command(cls=BenchCommand)
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="BUNDLE...")
@click.option("--url", help="A server that serves them.  [default: starts one on a free port]")
@click.option(
    "--requests",
    type=click.IntRange(min=10),
    help=f"[default: {_DEFAULT_REQUESTS}; in an open loop as many as come in --seconds]",
)
@click.option("--concurrency", type=click.IntRange(min=1, max=256), default=1, show_default=True)
@click.option("--rows", type=click.IntRange(min=1), default=1, show_default=True, help="Batch size of each request.")
@click.option("--target", default="auto", show_default=True, help="Runtime, as `fewheads build --target`.")
@click.option(
    "--cache", type=click.Path(path_type=Path), help="Directory of built models.  [default: ~/.cache/fewheads]"
)
@connection_options
@load_options
@device_options
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

    With --url, BUNDLE may also be the name of a served model. Then only the server is timed, with made-up numbers, or
    with lines of --texts for models of text.

    With --rate, send requests to all of them in an open loop instead: at times that no answer delays, with latency
    counted from when each request was due, and a report of how every one of them ended.

    With --on-device, time every tier in batches of one and of the most rows, warm and after pauses, with the board's
    power mode, clocks, temperature and energy. A run that throttled is refused.
    """
    on_device, own = options.pop("on_device"), {name: options.pop(name) for name in DEVICE_OPTIONS}
    check_options(click.get_current_context())
    if on_device:
        run_on_device(
            bundles, requests=requests or _DEFAULT_REQUESTS, target=target, cache=cache, as_json=as_json, **own
        )
        return
    if credentials and not url:
        fix = "Leave out TLS and the token: a server that is started for this listens on loopback, for anybody."
        raise UsageError("--url", given=Literally("none, with credentials"), expected="a server to show them", fix=fix)
    names = [path for path in bundles if url and not path.exists()]
    if is_open(click.get_current_context()):
        if names:
            fix = "An open loop sends golden inputs. Without --rate and --trace, a name is enough."
            raise UsageError("BUNDLE", given=str(names[0]), expected="a bundle directory", fix=fix)
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
    if options["texts"] and len(names) < len(bundles):
        given = Literally("it with a bundle, without --rate or --trace")
        fix = "Leave it out for the golden inputs."
        raise UsageError("--texts", given=given, expected="names of models at --url", fix=fix)
    from edge.load.bench import bench as bench_bundle
    from edge.load.served import bench_served
    from edge.load.workload import read_texts

    requests = requests or _DEFAULT_REQUESTS
    texts = read_texts(options["texts"]) if options["texts"] else ()
    reports = []
    with progress() as bar:
        for path in bundles:
            task = bar.add_task(path.name, total=5, note="")
            same: dict[str, Any] = {
                "url": url,
                "requests": requests,
                "concurrency": concurrency,
                "rows": rows,
                "credentials": credentials,
                "advanced": partial(bar.advance, task),
            }
            if path in names:
                reports.append(bench_served(str(path), texts=texts, **same))
            else:
                reports.append(bench_bundle(path, target=target, cache=cache, **same))
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
            if latency
        ],
    )
