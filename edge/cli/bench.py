"""``fewheads bench``: latency in process and served, open-loop load, and records of a board."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec import json

from edge.bench.load_plan import ENFORCERS, PATTERNS, POISSON, LoadPlan, OfferedRate
from edge.cli.options import (
    PATH,
    FloatRange,
    SectionedCommand,
    added,
    bundles_argument,
    cache_option,
    connection_options,
    given_options,
    numbers,
    section_option,
    target_option,
)
from edge.cli.output import heading, json_option, print_fields, print_json, print_table, progress, remark, working
from edge.errors import FewheadsError, Raw, ServerError, UsageError
from edge.files import check_parent, write_result
from edge.scheduling.job import PRIORITY_LEVELS

if TYPE_CHECKING:
    from edge.bench.on_device import DeviceRecord
    from edge.bench.open_loop import LoadReport

_DEFAULT_REQUESTS: Final = 2000
#: Steps of the progress bar of an open loop.
_STEPS: Final = 100
OPEN_LOOP, ON_DEVICE = "Open loop, with --rate", "On a board, with --on-device"
#: General parameters that --on-device allows beside its own.
_WITH_ON_DEVICE: Final = ("bundles", "--on-device", "--requests", "--target", "--cache", "--json")
_PERCENTILES: Final = ("p50_ms", "p90_ms", "p95_ms", "p99_ms", "p99_9_ms", "max_ms")
_CAUSE: Final = ("outcome", "cause", "count", "latency.p50_ms", "latency.p99_ms", "retry_after_p50_ms")
_LATENCY: Final = ("latency.p50_ms", "latency.p90_ms", "latency.p99_ms", "latency.count")
_SERIES: Final = ("model", "tier", "runtime", "device", "precision", "rows", "where", *_LATENCY)
_RATIO: Final = ("model", "tier", "rows", "where", "ratio", "low", "high", "rounds")
_load, _device = section_option(OPEN_LOOP), section_option(ON_DEVICE)
#: Their arguments have the names of :class:`edge.bench.load_plan.LoadPlan`.
_LOAD_OPTIONS = (
    _load("--rate", metavar="RATE", help="Requests per second, or 3x for three times the measured capacity."),
    _load("--arrivals", "pattern", type=click.Choice(PATTERNS), default=POISSON, help="Pattern of the arrivals."),
    _load("--seconds", type=FloatRange(min=0.1), default=10.0, help="Length of the measurement."),
    _load("--warm-up", "warm_up_seconds", type=FloatRange(0), default=1.0, help="Seconds before the measurement."),
    _load("--seed", type=click.IntRange(min=0), default=0, help="Equal seeds send equal requests."),
    _load("--deadline-ms", type=FloatRange(1), help="Deadline, from when a request is due."),
    _load("--deadline-by", "enforcer", type=click.Choice(ENFORCERS), default="client", help="What ends late requests."),
    _load(
        "--priority",
        type=click.IntRange(1, PRIORITY_LEVELS),
        help="Priority, 1 (the highest) to 10.  [default: the server's]",
    ),
    _load("--policy", help="Policy or tier.  [default: the server's]"),
    _load("--texts", type=PATH, help="File of texts, one to a line, to send in place of the golden inputs."),
    _load("--channels", type=click.IntRange(min=1, max=64), default=4, help="Connections."),
    _load("--max-outstanding", type=click.IntRange(min=1), default=10_000, help="Limit of requests in flight."),
)
_DEVICE_OPTIONS = (
    _device("--out", type=PATH, help="Write the record to this file; deploy/device_table.py makes tables of it."),
    _device("--rounds", type=click.IntRange(min=2, max=1000), default=10, help="Turns of all tiers and batch sizes."),
    _device("--idle-gaps", metavar="SECONDS,...", default="0.1,1,5", help="Pauses before single requests."),
    _device("--idle-requests", type=click.IntRange(min=1), default=20, help="Requests for each pause."),
    _device("--keep-throttled", is_flag=True, help="Write the record with the reasons if it must not be published."),
)


@click.command(cls=SectionedCommand, context_settings={"show_default": True})
@bundles_argument
@click.option("--url", help="A server that serves them.  [default: starts one on a free port]")
@click.option("--requests", type=click.IntRange(10), help=f"[default: {_DEFAULT_REQUESTS}; in an open loop no limit]")
@click.option("--concurrency", type=click.IntRange(min=1, max=256), default=1)
@click.option("--rows", type=click.IntRange(min=1), default=1, help="Batch size of each request.")
@click.option("--max-loops", type=click.IntRange(1), help="Budget of looped models.")
@click.option("--tolerance", type=FloatRange(0, min_open=True), help="Residual at which looped models end.")
@target_option
@cache_option
@connection_options
@click.option("--on-device", is_flag=True, help="Measure latency, energy and the board's state, by tier.")
@partial(added, (*_LOAD_OPTIONS, *_DEVICE_OPTIONS))
@json_option
def bench(bundles: tuple[Path, ...], as_json: bool, **options: Any) -> None:
    """Time each BUNDLE in process and through a server, in turns.

    The report has the ratio of both times.

    With --rate, send requests to all of them in an open loop instead: at times that do not depend on responses, with
    latency counted from when each request was due, and a report of how every request ended.

    With --on-device, time every tier in batches of one and of the most rows, warm and after pauses, with the board's
    power mode, clocks, temperature and energy. A run that throttled is refused.
    """
    mode = _mode()
    if options["credentials"] and not options["url"]:
        expected = "a server to which TLS or a token can be shown"
        fix = "Leave out TLS and the token: a server that bench starts listens on loopback, without either."
        raise UsageError("--url", expected=expected, fix=fix)
    if options["url"] and (missing := [path for path in bundles if not path.exists()]):
        fix = "perf_analyzer, which NVIDIA maintains, loads a server without the bundles that it serves."
        expected = "a bundle's directory, also with --url"
        raise UsageError("BUNDLE", given=str(missing[0]), expected=expected, fix=fix)
    for each in click.get_current_context().command.params:
        if getattr(each, "section", mode) != mode:
            del options[each.name or ""]
    del options["on_device"]
    modes: dict[str, Callable[..., None]] = {ON_DEVICE: _bench_on_device, OPEN_LOOP: _bench_open_loop}
    run = modes[mode] if mode else _bench_closed_loop
    run(bundles, as_json, **options)


def _bench_closed_loop(paths: tuple[Path, ...], as_json: bool, *, requests: int | None, **options: Any) -> None:
    from edge.bench.closed_loop import ROUNDS
    from edge.bench.closed_loop import bench as time_model

    requests, reports = requests or _DEFAULT_REQUESTS, []
    with progress() as bar:
        for path in paths:
            advanced = partial(bar.advance, bar.add_task(path.name, total=ROUNDS, note=""))
            reports.append(time_model(path, requests=requests, advanced=advanced, **options))
    if as_json:
        print_json(reports)
        return
    loops = ["loops"] if any(report.served.loops is not None for report in reports) else []
    rows = []
    for report in reports:
        sides = (("in process", report.in_process, 1.0), ("served", report.served, report.overhead_ratio))
        for where, it, ratio in sides:
            times = (it.p50_ms, it.p95_ms, it.p99_ms, it.per_second, ratio)
            rows.append([report.model, where, *times, *(it.loops for _ in loops)])
    print_table(
        f"{requests} requests of {options['rows']} row(s), {options['concurrency']} client(s)",
        ["model", "where", "p50 ms", "p95 ms", "p99 ms", "per second", "ratio", *loops],
        rows,
    )


def _mode() -> str:
    """Return the section of options that applies: open loop, on a board, or none of them."""
    given = {each.opts[0]: getattr(each, "section", "") for each in given_options()}
    keys = {ON_DEVICE: "--on-device", OPEN_LOOP: "--rate"}
    mode = next((section for section, key in keys.items() if key in given), "")
    for option, section in given.items():
        if mode == ON_DEVICE and section != ON_DEVICE and option not in _WITH_ON_DEVICE:
            fix = "Leave it out: every tier and batch size is measured, in process and through a server of its own."
            raise UsageError(option, expected="no such option beside --on-device", fix=fix)
        if section not in ("", mode):
            raise UsageError(
                option, expected=f"{keys[section]} beside it", fix=f"Add {keys[section]}, or leave it out."
            )
    if mode == OPEN_LOOP and "--concurrency" in given:
        fix = "Leave it out: in an open loop no client waits."
        raise UsageError("--concurrency", expected="no clients beside --rate", fix=fix)
    return mode


def _bench_open_loop(
    paths: tuple[Path, ...],
    as_json: bool,
    *,
    url: str | None,
    target: str,
    cache: Path | None,
    concurrency: int,
    rate: str,
    requests: int | None,
    texts: Path | None,
    **options: Any,
) -> None:
    """Measure one run and show its report, also after Ctrl-C and if requests failed or were lost, which then raise."""
    from edge.bench.closed_loop import server_for
    from edge.bench.inputs import read_texts
    from edge.bench.open_loop import measure
    from edge.bench.sender import FAILED, LOST
    from edge.bundles.bundle import Bundle

    options |= {"rate": OfferedRate.parse(rate), "requests": requests, "texts": read_texts(texts) if texts else ()}
    options |= {"seconds": math.inf} if requests else {}
    plan = LoadPlan(**{name: value for name, value in options.items() if value is not None})
    bundles = [Bundle.open(path) for path in paths]
    with server_for(bundles, url, target, cache) as address:
        with working(", ".join(bundle.manifest.name for bundle in bundles)) as show:
            result = measure(address, bundles, plan, advanced=lambda share: show(share * _STEPS, _STEPS))
        # Before the server ends, so that the report is there even if that fails.
        if as_json:
            print_json(result)
        else:
            _show_load(result)
    if result.interrupted:
        raise KeyboardInterrupt
    lost, failed = result.count(LOST), result.count(FAILED)
    if lost or failed:
        given = Raw(f"{failed} requests that failed, and {lost} without any answer")
        fix = "See the causes above, and its log; with --deadline-by client an answer that never comes is expired."
        expected = "an answer, a refusal or an expiry for each request"
        raise ServerError(f"server at {address}", given=given, expected=expected, fix=fix)


def _show_load(report: LoadReport) -> None:
    every = report.groups["all"]
    loops = ["loops"] if every.loops is not None else []
    rows: list[list[object]] = []
    for name, group in report.groups.items():
        row = [name, group.requests, *(group.outcomes.get(outcome, 0) for outcome in every.outcomes)]
        row += [getattr(group.latency, field) if group.latency.count else None for field in _PERCENTILES]
        rows.append([*row, *(group.loops for _ in loops)])
    print_table(report.summary, ["group", "requests", *every.outcomes, *map(heading, _PERCENTILES), *loops], rows)
    if report.causes:
        print_fields("Without an answer, with the time until the error", _CAUSE, report.causes)
    lag = report.lag
    remark(f"sent late by {lag.p50_ms:.3g} ms at p50, {lag.p99_ms:.3g} at p99, {lag.max_ms:.3g} at most")
    if memory := report.memory:
        before, after, peak = (size / 1e6 for size in (memory.before_bytes, memory.after_bytes, memory.peak_bytes))
        remark(f"server's resident memory: {before:.1f} MB before, {after:.1f} MB after, {peak:.1f} MB at most")
    for doubt in report.doubts:
        remark(f"not to be trusted: {doubt}")


def _bench_on_device(
    paths: tuple[Path, ...],
    as_json: bool,
    *,
    requests: int | None,
    target: str,
    cache: Path | None,
    out: Path | None,
    rounds: int,
    idle_gaps: str,
    idle_requests: int,
    keep_throttled: bool,
    **_: object,
) -> None:
    """Measure one run, and show and write its record."""
    from edge.bench.on_device import MeasurementPlan, measure_on_device

    gaps = numbers("--idle-gaps", idle_gaps, "seconds above 0, at most 600", most=600)
    if out:
        check_parent("--out", out)
    plan = MeasurementPlan(requests or _DEFAULT_REQUESTS, rounds, gaps, idle_requests)
    with working("measuring") as advanced:
        record = measure_on_device(paths, plan, target=target, cache=cache, advanced=advanced)
    if as_json:
        print_json(record)
    else:
        loops = ("loops",) if any(series.loops is not None for series in record.series) else ()
        print_fields(record.machine.label, (*_SERIES, "power_watts", "energy_millijoules", *loops), record.series)
        if record.idle_gaps:
            print_fields("served after a pause", ("model", "tier", "gap_seconds", *_LATENCY), record.idle_gaps)
        if record.ratios:
            print_fields("times faster than the full tier, 95 % interval over rounds", _RATIO, record.ratios)
    publish(record, out, keep=keep_throttled)


def publish(record: DeviceRecord, out: Path | None, *, keep: bool) -> None:
    """Write a record to a file, if there is one; raise a FewheadsError if it must not be published, unless ``keep``."""
    if not record.publishable and not keep:
        raise FewheadsError(
            f"benchmark on {record.machine.label}",
            given=Raw("; ".join(record.doubts)),
            expected="a run without throttling, in one power mode with the same clock limits",
            fix="Cool the board, set its power mode and measure again. --keep-throttled writes it, marked.",
        )
    for doubt in record.doubts:
        remark(f"not to be published: {doubt}")
    if out:
        write_result(out, json.format(json.encode(record), indent=1) + b"\n")
        remark(f"wrote {out}")
