"""``fewheads bench``: latency in process and served, open-loop load, and records of a board."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge.cli.bench import DEVICE_OPTIONS, LIMITS, LOAD_OPTIONS, ON_DEVICE, OPEN_LOOP, run_load, run_on_device
from edge.cli.options import (
    SectionedCommand,
    added,
    bundles_argument,
    cache_option,
    connection_options,
    given_options,
    target_option,
)
from edge.cli.output import json_option, print_json, print_table, progress
from edge.errors import Raw, UsageError

if TYPE_CHECKING:
    from edge.client.connection import Credentials

_DEFAULT_REQUESTS = 2000
#: General parameters that --on-device allows beside its own.
_WITH_ON_DEVICE = ("bundles", "--on-device", "--requests", "--target", "--cache", "--json")


@click.command(cls=SectionedCommand, context_settings={"show_default": True})
@bundles_argument
@click.option("--url", help="A server that serves them.  [default: starts one on a free port]")
@click.option("--requests", type=click.IntRange(10), help=f"[default: {_DEFAULT_REQUESTS}; in an open loop no limit]")
@click.option("--concurrency", type=click.IntRange(min=1, max=256), default=1)
@click.option("--rows", type=click.IntRange(min=1), default=1, help="Batch size of each request.")
@click.option("--max-loops", metavar="LOOPS", help="Budget of looped models; with --rate also LOOPS=PARTS,...")
@click.option(
    "--tolerance",
    "tolerances",
    metavar="RESIDUAL",
    help="Residual at which looped models end; with --rate also RESIDUAL=PARTS,...",
)
@target_option
@cache_option
@connection_options
@click.option("--on-device", is_flag=True, help="Measure latency, energy and the board's state, by tier.")
@partial(added, (*LOAD_OPTIONS, *DEVICE_OPTIONS))
@json_option
def bench(
    bundles: tuple[Path, ...],
    url: str | None,
    requests: int | None,
    concurrency: int,
    rows: int,
    max_loops: str | None,
    tolerances: str | None,
    target: str,
    cache: Path | None,
    credentials: Credentials | None,
    on_device: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Time each BUNDLE in process and through a server, in turns, and show the ratio.

    With --url, BUNDLE may also be the name of a served model. Then only the server is timed, with random numbers, or
    with lines of --texts for models of text.

    With --rate, send requests to all of them in an open loop instead: at times that do not depend on responses, with
    latency counted from when each request was due, and a report of how every request ended.

    With --on-device, time every tier in batches of one and of the most rows, warm and after pauses, with the board's
    power mode, clocks, temperature and energy. A run that throttled is refused.
    """
    mode, parameters = _mode(), click.get_current_context().command.params
    own = {each.name: options[each.name] for each in parameters if getattr(each, "section", None) == mode}
    same: dict[str, Any] = {"target": target, "cache": cache}
    if on_device:
        run_on_device(bundles, requests=requests or _DEFAULT_REQUESTS, as_json=as_json, **same, **own)
        return
    if credentials and not url:
        fix = "Leave out TLS and the token: a server that bench starts listens on loopback, without either."
        raise UsageError("--url", given=Raw("none, with credentials"), expected="a server to show them", fix=fix)
    names = [path for path in bundles if url and not path.exists()]
    same |= {"url": url, "rows": rows, "credentials": credentials}
    if mode == OPEN_LOOP:
        if names:
            fix = "An open loop sends golden inputs. Without --rate and --trace, a name is enough."
            raise UsageError("BUNDLE", given=str(names[0]), expected="a bundle directory", fix=fix)
        run_load(bundles, requests=requests, as_json=as_json, max_loops=max_loops, tolerances=tolerances, **same, **own)
        return
    opened = [path for path in bundles if path not in names]
    if options["texts"] and opened:
        given, fix = Raw(f"bundle {opened[0]}"), "Leave it out for the golden inputs, or give --rate or --trace."
        raise UsageError("--texts", given=given, expected="names of models at --url", fix=fix)
    from edge.bench import closed_loop as measurement
    from edge.bench.inputs import read_texts

    requests = requests or _DEFAULT_REQUESTS
    same |= {"requests": requests, "concurrency": concurrency}
    same["max_loops"] = _one("--max-loops", LIMITS["max_loops"], max_loops)
    same["tolerance"] = _one("--tolerance", LIMITS["tolerances"], tolerances)
    same["texts"] = read_texts(options["texts"]) if options["texts"] else ()
    reports = []
    with progress() as bar:
        for path in bundles:
            advanced = partial(bar.advance, bar.add_task(path.name, total=5, note=""))
            reports.append(measurement.bench(str(path) if path in names else path, advanced=advanced, **same))
    if as_json:
        print_json(reports)
        return
    loops = ["loops"] if any(report.served.loops is not None for report in reports) else []
    print_table(
        f"{requests} requests of {rows} row(s), {concurrency} client(s)",
        ["model", "where", "p50 ms", "p95 ms", "p99 ms", "per second", "ratio", *loops],
        [
            [
                *(report.model, where, latency.p50_ms, latency.p95_ms, latency.p99_ms, latency.per_second, ratio),
                *(latency.loops for _ in loops),
            ]
            for report in reports
            for where, latency, ratio in (
                ("in process", report.in_process, 1.0),
                ("served", report.served, report.overhead_ratio),
            )
            if latency
        ],
    )


def _one(option: str, read: Callable[[str], dict[float, float]], text: str | None) -> Any:
    """Return the limit that an option sets for all requests; None without one."""
    mix = read(text) if text else {}
    if len(mix) > 1:
        fix = "Give one value, or add --rate."
        raise UsageError(option, given=text, expected="one value for all requests", fix=fix)
    limit = next(iter(mix), None)
    return int(limit) if limit is not None and option == "--max-loops" else limit


def _mode() -> str:
    """Return the section of options that applies: open loop, on a board, or none of them."""
    given = {each.opts[0]: getattr(each, "section", "") for each in given_options()}

    def error(option: str, given: str, expected: str, fix: str) -> UsageError:
        return UsageError(option, given=Raw(given), expected=expected, fix=fix)

    board = [option for option, section in given.items() if section == ON_DEVICE]
    if "--on-device" in given:
        other = [option for option in given if option not in (*_WITH_ON_DEVICE, *board)]
        if other:
            fix = "Leave it out: every tier and batch size is measured, in process and through a server of its own."
            raise error(other[0], "it with --on-device", "it alone", fix)
        return ON_DEVICE
    if board:
        raise error(board[0], "it alone", "--on-device beside it", "Add --on-device, or leave it out.")
    if "--rate" in given and "--trace" in given:
        raise error("arrivals", "both --rate and --trace", "one of them", "Leave one out.")
    if "--rate" in given or "--trace" in given:
        if "--concurrency" in given:
            fix = "Leave it out: in an open loop no client waits."
            raise error("--concurrency", "it with --rate", "no clients", fix)
        return OPEN_LOOP
    load = sorted(option for option, section in given.items() if section == OPEN_LOOP and option != "--texts")
    if load:
        raise error(load[0], "it alone", "--rate or --trace beside it", "Say when requests come.")
    return ""
