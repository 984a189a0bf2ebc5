"""The open loop of ``fewheads bench``: its options and its output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from edge.cli.output import print_json, print_table, progress, stderr
from edge.errors import Literally, ServerError, UsageError
from edge.load.arrivals import PATTERNS, POISSON, read_trace

if TYPE_CHECKING:
    from edge.load.measure import Plan
    from edge.load.report import LoadReport, Percentiles

F = TypeVar("F", bound=Callable[..., Any])

_GIVEN = ParameterSource.COMMANDLINE
_ENFORCERS = ("client", "server", "both")
#: Steps of the progress bar.
_STEPS = 100


class _LoadOption(click.Option):
    """An option of the open loop."""

    section = "Open loop, with --rate or --trace"


_option = partial(click.option, cls=_LoadOption)
_OPTIONS = (
    _option("--rate", metavar="RATE", help="Requests per second, or 3x for three times the measured capacity."),
    _option("--arrivals", "pattern", type=click.Choice(PATTERNS), default=POISSON, show_default=True),
    _option(
        "--trace", type=click.Path(path_type=Path), help="In place of --rate: a file of times in seconds, by line."
    ),
    _option("--seconds", type=click.FloatRange(min=0.1), default=10.0, show_default=True),
    _option(
        "--warm-up",
        type=click.FloatRange(min=0),
        default=1.0,
        show_default=True,
        help="Seconds before the measurement.",
    ),
    _option("--seed", type=click.IntRange(min=0), default=0, show_default=True),
    _option("--burst-period", type=float, default=1.0, show_default=True, help="Seconds from burst to burst."),
    _option(
        "--burst-share", type=float, default=0.5, show_default=True, help="Share of the period in which requests come."
    ),
    _option("--weights", metavar="PARTS,...", help="Parts of the requests for each BUNDLE.  [default: equal]"),
    _option("--deadline-ms", metavar="MS[=PARTS],...", help="Counted from when a request is due.  [default: none]"),
    _option(
        "--deadline-by",
        "enforcer",
        type=click.Choice(_ENFORCERS),
        default="client",
        show_default=True,
        help="Whether the client's gRPC ends late requests, or the server, by the parameter `timeout`.",
    ),
    _option("--priority", metavar="LEVEL[=PARTS],...", help="[default: the server's]"),
    _option("--policy", metavar="NAME[=PARTS],...", help="Policies or tiers.  [default: the server's]"),
    _option(
        "--texts",
        type=click.Path(path_type=Path),
        help="File of texts, by line, to send in place of the golden inputs; also without --rate, for a name at --url.",
    ),
    _option("--channels", type=click.IntRange(min=1, max=64), default=4, show_default=True, help="Connections."),
    _option(
        "--patience",
        type=click.FloatRange(min=0.1),
        default=30.0,
        show_default=True,
        help="Seconds, after which an answer is lost where the client has no deadline.",
    ),
    _option("--max-outstanding", type=click.IntRange(min=1), default=10_000, show_default=True),
    _option("--max-lag-ms", type=click.FloatRange(min=0.01), help="[default: a tenth of the deadline, or 10]"),
    _option("--report", type=click.Path(path_type=Path), help="Write a page with pictures to FILE.html."),
    _option("--server-option", "arguments", multiple=True, help="For `fewheads serve`: --server-option=--instances=2"),
)


def load_options(command: F) -> F:
    """Add the options of the open loop to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class BenchCommand(click.Command):
    """A command whose help lists the options of each way to measure separately, by their ``section``."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one list of options for each section."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for each in sorted(self.get_params(ctx), key=lambda each: hasattr(each, "section")):
            record = each.get_help_record(ctx)
            if record:
                sections.setdefault(getattr(each, "section", "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def is_open(ctx: click.Context) -> bool:
    """Return whether ``--rate`` or ``--trace`` selects the open loop.

    Raises:
        UsageError: an option of the one loop is given to the other, or both ways to say when requests come.
    """
    given = [each for each in ctx.command.params if ctx.get_parameter_source(each.name or "") is _GIVEN]
    names = {each.opts[0] for each in given if isinstance(each, _LoadOption)}
    if not names & {"--rate", "--trace"}:
        names -= {"--texts"}  # also for names of models at --url
        if names:
            subject, expected = min(names), "--rate or --trace beside it"
            raise UsageError(subject, given=Literally("it alone"), expected=expected, fix="Say when requests come.")
        return False
    if {"--rate", "--trace"} <= names:
        given_both = Literally("both --rate and --trace")
        raise UsageError("arrivals", given=given_both, expected="one of them", fix="Leave one out.")
    if any("--concurrency" in each.opts for each in given):
        fix = "Leave it out: in an open loop nobody waits."
        raise UsageError("--concurrency", given=Literally("it with --rate"), expected="no clients", fix=fix)
    return True


def run_load(
    paths: tuple[Path, ...],
    *,
    url: str | None,
    requests: int | None,
    rows: int,
    target: str,
    cache: Path | None,
    as_json: bool,
    weights: str | None,
    report: Path | None,
    arguments: tuple[str, ...],
    **options: Any,
) -> None:
    """Measure and show one run.

    Raises:
        UsageError: an option is wrong.
        ServerError: requests were lost.
        KeyboardInterrupt: it was interrupted; the report of what there is has been shown.
    """
    from edge.bundles.bundle import Bundle
    from edge.load.bench import server_for
    from edge.load.measure import measure
    from edge.load.page import check_place, write_page

    if report:
        check_place(report)
    plan = _plan(requests, rows, **options)
    bundles = {Bundle.open(path): part for path, part in zip(paths, _parts(weights, len(paths)), strict=True)}
    with server_for(list(bundles), url, target, cache, arguments) as address:
        with _bar(", ".join(bundle.manifest.name for bundle in bundles)) as advanced:
            result = measure(address, bundles, plan, advanced=advanced)
        # While the server is still there: if it does not end well, what it did is shown all the same.
        if as_json:
            print_json(result)
        else:
            _show(result)
        if report:
            write_page(result, report)
            stderr.print(f"wrote {report}", highlight=False)
    if result.interrupted:
        raise KeyboardInterrupt
    if result.lost:
        given = Literally(f"{result.lost} requests without any answer")
        fix = "Look into its log; with --deadline-by client an answer that never comes counts as expired."
        raise ServerError(f"server at {address}", given=given, expected="an end to each request", fix=fix)


def _plan(
    requests: int | None,
    rows: int,
    *,
    rate: str | None,
    trace: Path | None,
    pattern: str,
    seconds: float,
    warm_up: float,
    burst_period: float,
    deadline_ms: str | None,
    priority: str | None,
    policy: str | None,
    texts: Path | None,
    patience: float,
    **same: Any,
) -> Plan:
    from edge.load.measure import Plan, Rate
    from edge.load.workload import UNSAID, Shares, read_texts

    shares = {"--deadline-ms": deadline_ms, "--priority": priority, "--policy": policy}
    deadlines, priorities, choices = (Shares.parse(name, text) if text else UNSAID for name, text in shares.items())
    return Plan(
        rate=Rate.parse(rate) if rate else None,
        trace=read_trace(trace) if trace else None,
        pattern=pattern,
        requests=requests,
        rows=rows,
        seconds=math.inf if requests and not trace else seconds,
        warm_up_seconds=warm_up,
        burst_period_seconds=burst_period,
        deadlines_ms=deadlines,
        priorities=priorities,
        choices=choices,
        texts=tuple(read_texts(texts)) if texts else (),
        patience_seconds=patience,
        **same,
    )


def _parts(weights: str | None, count: int) -> list[float]:
    if weights is None:
        return [1.0] * count
    try:
        parts = [float(part) for part in weights.split(",")]
    except ValueError:
        parts = []
    if len(parts) != count or not all(0 < part < math.inf for part in parts):
        expected = f"{count} numbers above 0, with commas between"
        raise UsageError("--weights", given=weights, expected=expected, fix="Give one for each BUNDLE, in their order.")
    return parts


@contextmanager
def _bar(name: str) -> Iterator[Callable[[float], None]]:
    with progress() as bar:
        task = bar.add_task(name, total=_STEPS, note="")
        yield lambda share: bar.update(task, completed=int(share * _STEPS))


def _show(report: LoadReport) -> None:
    capacity = f", capacity {report.capacity_per_second:.0f}" if report.capacity_per_second else ""
    deadlines = ", ".join(f"{each:g} ms" for each in report.deadlines_ms if each) or "no deadline"
    print_table(
        f"{report.pattern}, {report.rate_per_second:.4g} requests/s{capacity}, {deadlines}: {report.requests} requests "
        f"in {report.seconds:.4g} s, {report.in_time_per_second:.4g} answers/s in time",
        ["group", "requests", *report.outcomes, *_HEADINGS],
        [
            [name, group.requests, *(group.outcomes.get(key, 0) for key in report.outcomes), *_cells(group.latency)]
            for name, group in report.named_groups()
        ],
    )
    if report.causes:
        print_table(
            "Without an answer",
            ["outcome", "cause", "count", "answered after p50 ms", "p99 ms", "come again after, p50 ms"],
            [
                [
                    each.outcome,
                    each.cause,
                    each.count,
                    each.latency.p50_ms,
                    each.latency.p99_ms,
                    each.retry_after_p50_ms,
                ]
                for each in report.causes
            ],
        )
    lag = report.lag
    text = f"sent late by {lag.p50_ms:.3g} ms at p50, {lag.p99_ms:.3g} at p99, {lag.max_ms:.3g} at most"
    stderr.print(text, highlight=False)
    if report.memory:
        before, after, peak = (
            size / 1e6 for size in (report.memory.before_bytes, report.memory.after_bytes, report.memory.peak_bytes)
        )
        text = f"server's resident memory: {before:.1f} MB before, {after:.1f} MB after, {peak:.1f} MB at most"
        stderr.print(text, highlight=False)
    for doubt in report.doubts:
        stderr.print(f"[red]not to be trusted:[/red] {doubt}", highlight=False)


_HEADINGS = ("p50 ms", "p90 ms", "p95 ms", "p99 ms", "p99.9 ms", "max ms")


def _cells(latency: Percentiles) -> list[float | None]:
    if not latency.count:
        return [None] * len(_HEADINGS)
    return [latency.p50_ms, latency.p90_ms, latency.p95_ms, latency.p99_ms, latency.p99_9_ms, latency.max_ms]
